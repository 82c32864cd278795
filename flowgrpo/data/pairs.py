"""Recorded examples of prompts: preference pairs of images or texts, and demonstrations for supervised terms.

A file of pairs is `.jsonl`, one object per line with `prompt`, `chosen` and `rejected` (paths of images, relative to
the file; of a language model the texts themselves). Optional `aspects` is an object of names with "chosen", "rejected"
or "tie": the better one in that respect. Every line is also a verdict of the aspect `overall`, for `chosen`, unless
`aspects` names it. Optional `margins` is an object of aspects with numbers: how much better `chosen` is by the scores
of a judge, below 0 where `rejected` is.

A file of demonstrations is `.jsonl`, one object per line with `prompt` and either `image` (a path, relative to the
file) or `text` (an answer). Optional are `reward`, a number (default 1), and `source`, the name of where it comes from.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowgrpo.config.schema import Config
from flowgrpo.data import sets
from flowgrpo.data.prompts import LARGEST, Prompt
from flowgrpo.errors import UserError, nearest
from flowgrpo.files import beside, json_lines, require_ending, text_of, unfit, unsafe

OVERALL = "overall"
ASPECT = re.compile(r"[\w-]+")  # the name of one
WORTH = {"chosen": 1.0, "rejected": 0.0, "tie": 0.5}
Prompts = list[Prompt]


@dataclass(frozen=True)
class Pair:
    """Two images, or two texts, of a prompt.

    verdicts: by aspect 1 for `chosen`, 0 for `rejected`, 1/2 for a tie.
    margins: by aspect the score of `chosen` less that of `rejected`, where a judge has said them.
    """

    prompt: str
    chosen: Path | str
    rejected: Path | str
    verdicts: dict[str, float] = field(default_factory=lambda: {OVERALL: 1.0}, hash=False)
    margins: dict[str, float] = field(default_factory=dict, hash=False)


def load_pairs(path: str | Path, text: bool = False) -> list[Pair]:
    """Read a .jsonl file of pairs, of texts or of paths of images. Raises UserError with file and line of a mistake."""
    path = Path(path)
    pairs = []
    for place, record in records(path, "pairs", ("prompt", "chosen", "rejected", "aspects", "margins"),
                                  "prompt, chosen and rejected"):
        prompt = _text(record.get("prompt"), "prompt", place)
        chosen, rejected = (_text(record.get(key), key, place, blank=True) if text else
                            _image(record.get(key), key, place, path) for key in ("chosen", "rejected"))
        if chosen == rejected:
            raise UserError(f"{place}: chosen and rejected are the same {'text' if text else 'image'}, "
                            f"{record['chosen'][:200]}")
        verdicts = _verdicts(record.get("aspects"), place)
        margins = {} if record.get("margins") is None else record["margins"]
        if not isinstance(margins, dict) or not all(type(value) in (int, float) and abs(value) < math.inf
                                                    for value in margins.values()):
            raise UserError(f"{place}: expected an object of aspects and finite numbers under 'margins', got "
                            f"{margins!r}")
        pairs.append(Pair(prompt.strip(), chosen, rejected, verdicts,
                          {name: float(value) for name, value in margins.items()}))
    if not pairs:
        raise UserError(f"pairs {path}: the file holds no pair")
    return pairs


def records(path: Path, what: str, keys: Sequence[str], needed: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a .jsonl file, each with its place, which begins errors. needed: keys, in words."""
    require_ending(path, (".jsonl",), what)
    for number, record in json_lines(text_of(path, LARGEST, what), f"{what} {path}"):
        place = f"{what} {path}, line {number}"
        if not isinstance(record, dict):
            raise UserError(f"{place}: expected an object with the keys {needed}, got {record!r}")
        if "picture" in record and "image" in keys and "image" not in record:  # the key's name before
            record["image"] = record.pop("picture")
        for key in record:
            if key not in keys:
                raise UserError(f"{place}: unknown key {key!r}{nearest(key, list(keys))}")
        yield place, record


def without_ties(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs without the ties of `overall`, each with its preferred side as `chosen`."""
    return [pair if pair.verdicts[OVERALL] else Pair(pair.prompt, pair.rejected, pair.chosen)
            for pair in pairs if pair.verdicts[OVERALL] != 0.5]


def split(pairs: list[Pair], held_out: float | str, text: bool = False) -> tuple[list[Pair], list[Pair]]:
    """Split pairs into (train, held out); no prompt is ever on both sides. text: of a file, as in `load_pairs`.

    A share holds out the pairs of that part of the different prompts, always the same ones. A path is read as the
    held-out pairs, and the pairs of their prompts leave the other side. Raises UserError if a side is left empty.
    """
    if isinstance(held_out, str):
        held = load_pairs(held_out, text)
        texts = {pair.prompt for pair in held}
    else:
        prompts = [Prompt(text) for text in sorted({pair.prompt for pair in pairs})]
        texts = {prompt.text for prompt in sets.split(prompts, held_out, sets.SPLIT_SEED)[1]}
        held = [pair for pair in pairs if pair.prompt in texts]
    train = [pair for pair in pairs if pair.prompt not in texts]
    if not train:
        raise UserError(f"held_out: {held_out!r} holds out every pair and leaves none to train on")
    return train, held


def aspects(train: Sequence[Pair], held: Sequence[Pair]) -> list[str]:
    """Names of all aspects, in order of appearance. Raises UserError for one without a preference in any training pair,
    and if no held-out pair has a preference."""
    names = list(dict.fromkeys(name for pair in (*train, *held) for name in pair.verdicts))
    for name in names:
        if not any(pair.verdicts.get(name, 0.5) != 0.5 for pair in train):
            raise UserError(f"aspect {name!r}: no training pair prefers a side in it: give such pairs, or leave it "
                            "out")
    if all(verdict == 0.5 for pair in held for verdict in pair.verdicts.values()):
        raise UserError("held_out: none of the held-out pairs prefers a side, so that accuracy cannot be measured: "
                        "hold out more")
    return names


def _text(given: Any, key: str, place: str, blank: bool = False) -> str:
    if not isinstance(given, str) or not (blank or given.strip()):
        raise UserError(f"{place}: expected a text under {key!r}, got {given!r}")
    if why := unsafe(given):
        raise UserError(f"{place}: the text under {key!r} holds {why}")
    return given


def _image(name: Any, key: str, place: str, file: Path) -> Path:
    if not isinstance(name, str) or not name:
        raise UserError(f"{place}: expected the path of an image under {key!r}, got {name!r}")
    try:
        image = beside(file, name)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    if why := unfit(image):
        raise UserError(f"{place}: no image at {image}" + ("" if why == "does not exist" else f": it {why}"))
    return image


def _verdicts(given: Any, place: str) -> dict[str, float]:
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise UserError(f"{place}: expected an object of names and verdicts under 'aspects', got {given!r}")
    for name, verdict in given.items():
        if not ASPECT.fullmatch(name):
            raise UserError(f"{place}: the aspect {name!r} is no name: expected letters, digits, _ and - only")
        if not isinstance(verdict, str) or verdict not in WORTH:
            raise UserError(f"{place}: aspect {name!r}: expected \"chosen\", \"rejected\" or \"tie\", got {verdict!r}")
    return {OVERALL: 1.0} | {name: WORTH[verdict] for name, verdict in given.items()}


@dataclass(frozen=True)
class Demonstration:
    """Recorded output of a prompt: the path of an image, or the text of an answer."""

    prompt: str
    image: Path | None = None
    text: str | None = None
    reward: float = 1.0
    source: str = ""


def load_demonstrations(path: str | Path) -> list[Demonstration]:
    """Read a .jsonl file of demonstrations. Raises UserError with the file and the line of a mistake."""
    path = Path(path)
    demonstrations = []
    for place, record in records(path, "demonstrations", ("prompt", "image", "text", "reward", "source"),
                                  "prompt and image or text"):
        if ("image" in record) == ("text" in record):
            raise UserError(f"{place}: expected either 'image' or 'text'")
        for key in ("prompt", "image", "text", "source"):
            if key in record or key == "prompt":
                _text(record.get(key), key, place)
        image = _image(record["image"], "image", place, path) if "image" in record else None
        reward = record.get("reward", 1.0)
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise UserError(f"{place}: expected a number under 'reward', got {reward!r}")
        demonstrations.append(Demonstration(record["prompt"].strip(), image, record.get("text"), float(reward),
                                            record.get("source", "")))
    if not demonstrations:
        raise UserError(f"demonstrations {path}: the file holds no demonstration")
    return demonstrations


def in_place(config: Config, split: tuple[Prompts, Prompts], text: bool = False) -> tuple[Prompts, Prompts]:
    """(training, held-out) prompts; with `preferences`, its pairs replace the training ones.

    text: the pairs are of texts. A prompt stands for one pair. Its metadata has the files, or the texts, `chosen` and
    `rejected`, the verdict `preferred`, 1 for the chosen one, and the metadata that the prompt file has for the same
    text. With labels from the file, `chosen` is the preferred side, even if the line calls it otherwise; ties are left
    out. No held-out prompt is trained on.
    Raises UserError if no pair is left.
    """
    if config.preferences is None:
        return split
    train, held = split
    known, unseen = {prompt.text: prompt for prompt in train}, {prompt.text for prompt in held}
    pairs = load_pairs(config.preferences, text)
    pairs = [pair for pair in (pairs if config.labels == "rewards" else without_ties(pairs))
             if pair.prompt not in unseen]
    if not pairs:
        raise UserError(f"preferences {config.preferences}: every pair is a tie or one of a held-out prompt, which "
                        "leaves none to train on")
    prompts = []
    for pair in pairs:
        prompt = known.get(pair.prompt, Prompt(pair.prompt))
        facts = {"chosen": str(pair.chosen), "rejected": str(pair.rejected), "preferred": pair.verdicts[OVERALL]}
        prompts.append(replace(prompt, metadata=prompt.metadata | facts))
    return prompts, held
