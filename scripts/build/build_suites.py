"""Write the suite that ships: flowgrpo/data/packaged/geneval_coco.jsonl. `train` makes training prompts of its kind.

    python scripts/build/build_suites.py

After GenEval (Ghosh et al. 2023, 2310.11513), with its six tasks, its metadata and the 80 names of COCO's objects, but
with prompts of its own: every object comes up nearly equally often in every task, and the article and the plural are
those of English. The same on every run. (The starter's suite is its held-out file, which build_prompts.py writes.)
"""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torchvision.models.detection import FasterRCNN_ResNet50_FPN_V2_Weights

from flowgrpo.data.suites import SHIPPED
from flowgrpo.rewards.geneval.colours import NAMES
from flowgrpo.rewards.geneval.detectors import canonical_label
from flowgrpo.rewards.geneval.rules import RELATIONS

FILE = Path(SHIPPED["geneval_coco"])
OBJECTS = tuple(canonical_label(name) for name in FasterRCNN_ResNet50_FPN_V2_Weights.DEFAULT.meta["categories"]
                if name not in ("__background__", "N/A"))  # COCO's, by GenEval's names
SEED, EACH = 0, 100  # prompts of a task that pairs objects
PAIRS = ("skis", "scissors")  # plural words for one thing
UNCOUNTED = (*PAIRS, "broccoli", "person")  # no sound plural, or none that a detector would count one by one
IRREGULAR = {"knife": "knives", "sheep": "sheep", "mouse": "mice", "computer mouse": "computer mice"}
NUMBERS = {2: "two", 3: "three", 4: "four"}
OPPOSITE = {"right of": "left of", "below": "above"}
MOST = 500  # training prompts of a task


def one(name: str, colour: str = "") -> str:
    """`an apple`, `a red apple`, `a pair of red skis`."""
    words = f"{colour} {name}".strip()
    if name in PAIRS:
        return f"a pair of {words}"
    return f"{'an' if words[0] in 'aeiou' and not words.startswith('uni') else 'a'} {words}"


def many(name: str) -> str:
    if name in IRREGULAR:
        return IRREGULAR[name]
    return name + ("es" if name.endswith(("s", "sh", "ch", "x")) else "s")


def endless(rng: np.random.Generator, names: tuple[str, ...]) -> Iterator[str]:
    """Permutation after permutation of the names."""
    while True:
        yield from (names[i] for i in rng.permutation(len(names)))


def pairs(rng: np.random.Generator, names: tuple[str, ...], count: int) -> list[tuple[str, str]]:
    """Different pairs of different names."""
    first, second, found = endless(rng, names), endless(rng, names), {}
    while len(found) < count:
        pair = next(first), next(second)
        if pair[0] != pair[1] and pair[::-1] not in found:
            found[pair] = None
    return list(found)


def record(tag: str, include: list[dict[str, Any]], text: str, **further: Any) -> dict[str, Any]:
    return {"tag": tag, "include": include, **further, "prompt": f"a photo of {text}"}


def clause(name: str, count: int = 1, **further: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **further}


def build() -> list[dict[str, Any]]:
    rng, coloured = np.random.default_rng(SEED), tuple(name for name in OBJECTS if name != "person")
    counted = tuple(name for name in OBJECTS if name not in UNCOUNTED)
    single = (record("single_object", [clause(name)], one(name)) for name in OBJECTS)
    two = (record("two_object", [clause(a), clause(b)], f"{one(a)} and {one(b)}") for a, b in pairs(rng, OBJECTS, EACH))
    numbers = [(name, 2 + place % len(NUMBERS)) for place, name in enumerate(counted[i] for i in
                                                                            rng.permutation(len(counted)))]
    counting = (record("counting", [clause(name, n)], f"{NUMBERS[n]} {many(name)}", exclude=[clause(name, n + 1)])
                for name, n in numbers)
    paint = endless(rng, NAMES)
    shades = [(name, next(paint)) for name in (coloured[i] for i in rng.permutation(len(coloured)))]
    colours = (record("colors", [clause(name, color=shade)], one(name, shade)) for name, shade in shades)
    places = zip(pairs(rng, OBJECTS, EACH), endless(rng, RELATIONS))
    position = (record("position", [clause(b), clause(a, position=[place, 0])], f"{one(a)} {place} {one(b)}")
                for (a, b), place in places)
    two_shades = zip(pairs(rng, coloured, EACH), chain.from_iterable(pairs(rng, NAMES, 40) for _ in range(3)))
    attribution = (record("color_attr", [clause(a, color=c), clause(b, color=d)], f"{one(a, c)} and {one(b, d)}")
                   for (a, b), (c, d) in two_shades)
    return [*single, *two, *counting, *colours, *position, *attribution]


def train(held_out: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Training prompts of the five tasks that combine something, none with the scene of a held-out record.

    A task has at most `MOST`. A single object makes 80 prompts in all, every one of which GenEval measures.
    """
    rng, taken = np.random.default_rng(1), {scene(record) for record in held_out}
    coloured = [name for name in OBJECTS if name != "person"]
    tasks = [
        [record("two_object", [clause(a), clause(b)], f"{one(a)} and {one(b)}") for a, b in pairs(rng, OBJECTS, 1000)],
        [record("counting", [clause(name, n)], f"{NUMBERS[n]} {many(name)}", exclude=[clause(name, n + 1)])
         for name in OBJECTS if name not in UNCOUNTED for n in NUMBERS],
        [record("colors", [clause(name, color=shade)], one(name, shade)) for name in coloured for shade in NAMES],
        [record("position", [clause(b), clause(a, position=[place, 0])], f"{one(a)} {place} {one(b)}")
         for (a, b), place in zip(pairs(rng, OBJECTS, 1000), endless(rng, RELATIONS))],
        [record("color_attr", [clause(a, color=c), clause(b, color=d)], f"{one(a, c)} and {one(b, d)}")
         for (a, b), (c, d) in zip(pairs(rng, tuple(coloured), 1000),
                                   chain.from_iterable(pairs(rng, NAMES, 40) for _ in range(25)))],
    ]
    free = [[each for each in task if scene(each) not in taken] for task in tasks]
    return [task[place] for task in free for place in sorted(rng.permutation(len(task))[:MOST])]


def scene(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return the request of a record, in any order of its words: `a left of b` is `b right of a`."""
    include = record["include"]
    if record["tag"] == "position":
        place, pair = include[1]["position"][0], (include[1]["class"], include[0]["class"])
        return "position", *((OPPOSITE[place], *pair[::-1]) if place in OPPOSITE else (place, *pair))
    return record["tag"], *sorted(json.dumps(each, sort_keys=True) for each in include)


def main() -> None:
    records = build()
    FILE.write_text("".join(json.dumps(each) + "\n" for each in records))
    tags = [each["tag"] for each in records]
    print(f"{FILE.name}: {len(records)} prompts, {({tag: tags.count(tag) for tag in dict.fromkeys(tags)})}")


if __name__ == "__main__":
    main()
