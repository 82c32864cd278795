"""Write the training prompts of our own: flowgrpo/data/packaged/ocr_train.jsonl, general.jsonl and general_video.jsonl.

    python scripts/build/build_training_prompts.py

Every word is from the lists below and from `training_words.py`; none comes from a published set. No prompt, and no text
that an image is asked to show, is one of a packaged test set, in any case, spacing or punctuation. The same on every
run. `ocr_train` trains for the reward `ocr`, whose held-out side is Flow-GRPO's test file. `general` and
`general_video` are for rewards of preference and aesthetics, where no hub is at hand.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import training_words as words

from flowgrpo.data import sets
from flowgrpo.data.selection import words_of

OCR, IMAGES, VIDEOS = 3000, 600, 300  # prompts of each file
Pick = Callable[[Sequence[str]], str]


def plain(text: str) -> str:
    """Return a text without case, spaces and punctuation."""
    return "".join(words_of(text))


def test_files() -> list[Path]:
    """Return the packaged files that models are compared on, without those of the starters."""
    return [side for one in sets.SETS.values() for side in one.tests
            if isinstance(side, Path) and side.parent == sets.FOLDER]


def taken() -> tuple[set[str], set[str]]:
    """Return the prompts of all packaged test sets, and the texts that they ask for, as `plain` writes them."""
    prompts = [prompt for side in test_files() for prompt in sets.load(side)]
    return ({plain(prompt.text) for prompt in prompts},
            {plain(str(prompt.metadata["text"])) for prompt in prompts if "text" in prompt.metadata})


def picker(rng: np.random.Generator) -> Pick:
    """Return a function that draws one of some words."""
    return lambda choices: choices[int(rng.integers(len(choices)))]


def filled(template: str, pick: Pick, slots: Mapping[str, Sequence[str]]) -> str:
    """Return a template with a word in each slot, none of them twice, and a capital letter in front."""
    text = template
    while "{" in text:
        name = text.partition("{")[2].partition("}")[0]
        while (word := pick(slots[name])) in text:
            pass
        text = text.replace(f"{{{name}}}", word, 1)
    return text[0].upper() + text[1:]


def of_ocr(kind: str, pick: Pick) -> dict[str, Any]:
    """Return a prompt that asks for a text of a kind on a surface that bears such texts."""
    text = filled(pick(words.TEXTS[kind]), pick, words.TEXT_SLOTS)
    scene = {"surface": words.SURFACES[kind], "place": words.PLACES[kind], "light": words.LIGHT, "look": words.LOOKS,
             "letters": words.LETTERS, "reads": words.READS}
    prompt = filled(pick(words.FRAMES).replace("TEXT", "\0"), pick, scene).replace("\0", f'"{text}"')
    return {"prompt": prompt, "metadata": {"text": text, "category": kind}}


def of_category(category: str, templates: Mapping[str, Sequence[str]], pick: Pick) -> dict[str, Any]:
    """Return a prompt of a category."""
    text = filled(pick(templates[category]), pick, words.SLOTS)
    return {"prompt": text, "metadata": {"category": category}}


def gathered(count: int, categories: Sequence[str], make: Callable[[str], dict[str, Any]],
             free: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Return so many different prompts, the categories in turn."""
    found: dict[str, dict[str, Any]] = {}
    for place in range(count):
        while True:
            row = make(categories[place % len(categories)])
            if plain(row["prompt"]) not in found and free(row):
                break
        found[plain(row["prompt"])] = row
    return list(found.values())


def build() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each file by its name."""
    prompts, texts = taken()

    def free(row: dict[str, Any]) -> bool:
        return plain(row["prompt"]) not in prompts and plain(row["metadata"].get("text", "-")) not in texts

    ocr, images, videos = (picker(np.random.default_rng(seed)) for seed in (0, 1, 2))
    return {"ocr_train": gathered(OCR, list(words.TEXTS), lambda kind: of_ocr(kind, ocr), free),
            "general": gathered(IMAGES, list(words.IMAGES), lambda kind: of_category(kind, words.IMAGES, images), free),
            "general_video": gathered(VIDEOS, list(words.VIDEOS), lambda kind: of_category(kind, words.VIDEOS, videos),
                                      free)}


def main() -> None:
    for name, rows in build().items():
        file = Path(sets.FOLDER / f"{name}.jsonl")
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        print(f"{name}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
