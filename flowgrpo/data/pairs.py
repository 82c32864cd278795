"""Recorded examples of prompts: preference pairs of images or texts, and demonstrations for supervised terms.

A file of pairs is `.jsonl`, one object per line with `prompt`, `chosen` and `rejected` (paths of images, relative to
the file; of a language model the texts themselves). Optional `aspects` is an object of names with "chosen", "rejected"
or "tie": the better one in that respect. Every line is also a verdict of the aspect `overall`, for `chosen`, unless
`aspects` names it. Optional `margins` is an object of aspects with numbers: how much better `chosen` is by the scores
of a judge, below 0 where `rejected` is.

A file of demonstrations is `.jsonl`, one object per line with `prompt` and either `image` (a path, relative to the
file) or `text` (an answer). Optional are `reward`, a number (default 1), and `source`, the name of where it comes from.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowgrpo.config.schema import Config
from flowgrpo.data import sets
from flowgrpo.data.prompts import LARGEST, Prompt
from flowgrpo.errors import UserError, nearest
from flowgrpo.files import beside, parse_json, require_ending, require_size, unfit, unsafe

KEYS = ("prompt", "chosen", "rejected", "aspects", "margins")
OVERALL = "overall"
ASPECT = re.compile(r"[\w-]+")  # the name of one
WORTH = {"chosen": 1.0, "rejected": 0.0, "tie": 0.5}
DEMONSTRATION_KEYS = ("prompt", "image", "text", "reward", "source")
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
    """Read a .jsonl file of pairs. text: `chosen` and `rejected` are texts, not paths of images.

    Raises UserError with the file and the line of a mistake.
    """
    path = Path(path)
    require_ending(path, (".jsonl",), "pairs")
    if why := unfit(path):
        raise UserError(f"pairs {path}: {'no such file' if why == 'does not exist' else why}")
    require_size(path, LARGEST, f"pairs {path}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"pairs {path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    pairs = [_pair(line, path, number, text) for number, line in enumerate(lines, 1) if line.strip()]
    if not pairs:
        raise UserError(f"pairs {path}: the file holds no pair")
    return pairs


def without_ties(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs without the ties of `overall`, each with its preferred side as `chosen`."""
    return [pair if pair.verdicts[OVERALL] else Pair(pair.prompt, pair.rejected, pair.chosen)
            for pair in pairs if pair.verdicts[OVERALL] != 0.5]


def split(pairs: list[Pair], held_out: float | str, text: bool = False) -> tuple[list[Pair], list[Pair]]:
    """Split pairs into (train, held out); no prompt is ever on both sides. text: of a file, as in `load_pairs`.

    A share holds out the pairs of that part of the different prompts, always the same ones. A path is read as the
    held-out pairs, and the pairs of their prompts leave the training side.
    Raises UserError if a side is left empty.
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
    """Return the names of all aspects, in order of appearance.

    Raises UserError for one without a preference in any training pair, and if no held-out pair has a preference.
    """
    names = list(dict.fromkeys(name for pair in (*train, *held) for name in pair.verdicts))
    for name in names:
        if not any(pair.verdicts.get(name, 0.5) != 0.5 for pair in train):
            raise UserError(f"aspect {name!r}: no training pair prefers a side in it: give such pairs, or leave it "
                            "out")
    if all(verdict == 0.5 for pair in held for verdict in pair.verdicts.values()):
        raise UserError("held_out: none of the held-out pairs prefers a side, so that accuracy cannot be measured: "
                        "hold out more")
    return names


def _pair(row: str, path: Path, line: int, text: bool) -> Pair:
    try:
        record = parse_json(row)
    except json.JSONDecodeError as error:
        raise _wrong(path, line, f"not valid JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(record, dict):
        raise _wrong(path, line, f"expected an object with the keys prompt, chosen and rejected, got {record!r}")
    for key in record:
        if key not in KEYS:
            raise _wrong(path, line, f"unknown key {key!r}{nearest(key, list(KEYS))}")
    prompt = record.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise _wrong(path, line, f"expected a text under 'prompt', got {prompt!r}")
    if why := unsafe(prompt):
        raise _wrong(path, line, f"the text under 'prompt' holds {why}")
    chosen, rejected = ((_text if text else _image)(record.get(key), key, path, line)
                        for key in ("chosen", "rejected"))
    if chosen == rejected:
        what = "text" if text else "image"
        raise _wrong(path, line, f"chosen and rejected are the same {what}, {record['chosen'][:200]}")
    return Pair(prompt.strip(), chosen, rejected, _verdicts(record.get("aspects"), path, line),
                _margins(record.get("margins"), path, line))


def _text(given: Any, key: str, path: Path, line: int) -> str:
    if not isinstance(given, str):
        raise _wrong(path, line, f"expected a text under {key!r}, got {given!r}")
    if why := unsafe(given):
        raise _wrong(path, line, f"the text under {key!r} holds {why}")
    return given


def _image(name: Any, key: str, path: Path, line: int) -> Path:
    if not isinstance(name, str) or not name:
        raise _wrong(path, line, f"expected the path of an image under {key!r}, got {name!r}")
    try:
        image = beside(path, name)
    except UserError as error:
        raise _wrong(path, line, str(error)) from None
    if why := unfit(image):
        raise _wrong(path, line, f"no image at {image}" + ("" if why == "does not exist" else f": it {why}"))
    return image


def _verdicts(given: Any, path: Path, line: int) -> dict[str, float]:
    if given is None:
        return {OVERALL: 1.0}
    if not isinstance(given, dict):
        raise _wrong(path, line, f"expected an object of names and verdicts under 'aspects', got {given!r}")
    for name, verdict in given.items():
        if not ASPECT.fullmatch(name):
            raise _wrong(path, line, f"the aspect {name!r} is no name: expected letters, digits, _ and - alone")
        if not isinstance(verdict, str) or verdict not in WORTH:
            raise _wrong(path, line, f"aspect {name!r}: expected \"chosen\", \"rejected\" or \"tie\", got {verdict!r}")
    return {OVERALL: 1.0} | {name: WORTH[verdict] for name, verdict in given.items()}


def _margins(given: Any, path: Path, line: int) -> dict[str, float]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(type(value) in (int, float) and abs(value) < math.inf
                                              for value in given.values()):
        raise _wrong(path, line, f"expected an object of aspects and finite numbers under 'margins', got {given!r}")
    return {name: float(value) for name, value in given.items()}


def _wrong(path: Path, line: int, what: str) -> UserError:
    return UserError(f"pairs {path}, line {line}: {what}")


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
    require_ending(path, (".jsonl",), "demonstrations")
    if why := unfit(path):
        raise UserError(f"demonstrations {path}: {'no such file' if why == 'does not exist' else why}")
    require_size(path, LARGEST, f"demonstrations {path}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"demonstrations {path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    records = [_demonstration(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise UserError(f"demonstrations {path}: the file holds no demonstration")
    return records


def _demonstration(line: str, path: Path, number: int) -> Demonstration:
    try:
        record = parse_json(line)
    except json.JSONDecodeError as error:
        raise _wrong_demonstration(path, number, f"not valid JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(record, dict):
        raise _wrong_demonstration(path, number, f"expected an object with the keys prompt and image or text, "
                                                 f"got {record!r}")
    if "picture" in record and "image" not in record:  # the key's name before
        record["image"] = record.pop("picture")
    for key in record:
        if key not in DEMONSTRATION_KEYS:
            raise _wrong_demonstration(path, number, f"unknown key {key!r}{nearest(key, list(DEMONSTRATION_KEYS))}")
    if ("image" in record) == ("text" in record):
        raise _wrong_demonstration(path, number, "expected either 'image' or 'text'")
    texts = {key: record[key] for key in ("prompt", "image", "text", "source") if key in record}
    for key, value in {"prompt": None, **texts}.items():
        if not isinstance(value, str) or not value.strip():
            raise _wrong_demonstration(path, number, f"expected a text under {key!r}, got {value!r}")
        if why := unsafe(value):
            raise _wrong_demonstration(path, number, f"the text under {key!r} holds {why}")
    try:
        image = beside(path, record["image"]) if "image" in record else None
    except UserError as error:
        raise _wrong_demonstration(path, number, str(error)) from None
    if image is not None and (why := unfit(image)):
        raise _wrong_demonstration(path, number, f"no image at {image}"
                                   + ("" if why == "does not exist" else f": it {why}"))
    return Demonstration(record["prompt"].strip(), image, record.get("text"),
                         _number(record.get("reward", 1.0), path, number), record.get("source", ""))


def _number(value: Any, path: Path, line: int) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _wrong_demonstration(path, line, f"expected a number under 'reward', got {value!r}")
    return float(value)


def _wrong_demonstration(path: Path, line: int, what: str) -> UserError:
    return UserError(f"demonstrations {path}, line {line}: {what}")


def in_place(config: Config, split: tuple[Prompts, Prompts], text: bool = False) -> tuple[Prompts, Prompts]:
    """Return the (training, held-out) prompts; with `preferences`, its pairs replace the training ones.

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
    return [_prompt(known.get(pair.prompt, Prompt(pair.prompt)), pair) for pair in pairs], held


def _prompt(prompt: Prompt, pair: Pair) -> Prompt:
    metadata = {"chosen": str(pair.chosen), "rejected": str(pair.rejected), "preferred": pair.verdicts[OVERALL]}
    return replace(prompt, metadata=prompt.metadata | metadata)
