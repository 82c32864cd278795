"""Preference pairs of images: load them from a file, and hold out those of some prompts.

A file of pairs is `.jsonl`, one object per line with `prompt`, `chosen` and `rejected` (paths of images, relative to
the file). Optional `aspects` is an object of names with "chosen", "rejected" or "tie": the better one in that respect.
Every line is also a verdict of the aspect `overall`, for `chosen`, unless `aspects` names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowgrpo.data import splits
from flowgrpo.data.prompts import LARGEST, Prompt
from flowgrpo.errors import UserError, nearest
from flowgrpo.files import decoded, require_size, unfit, unsafe

KEYS = ("prompt", "chosen", "rejected", "aspects")
OVERALL = "overall"
WORTH = {"chosen": 1.0, "rejected": 0.0, "tie": 0.5}


@dataclass(frozen=True)
class Pair:
    """Two images of a prompt, and by aspect the verdict: 1 for `chosen`, 0 for `rejected`, 1/2 for a tie."""

    prompt: str
    chosen: Path
    rejected: Path
    verdicts: dict[str, float] = field(default_factory=lambda: {OVERALL: 1.0}, hash=False)


def load_pairs(path: str | Path) -> list[Pair]:
    """Read a .jsonl file of pairs.

    Raises UserError with the file and the line of a mistake.
    """
    path = Path(path)
    if path.suffix != ".jsonl":
        raise UserError(f"pairs {path}: expected a .jsonl file, got {path.suffix or 'no ending'!r}")
    if why := unfit(path):
        raise UserError(f"pairs {path}: {'no such file' if why == 'does not exist' else why}")
    require_size(path, LARGEST, f"pairs {path}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"pairs {path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    pairs = [_pair(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not pairs:
        raise UserError(f"pairs {path}: the file holds no pair")
    return pairs


def split(pairs: list[Pair], held_out: float | str) -> tuple[list[Pair], list[Pair]]:
    """Split pairs into (train, held out); no prompt is ever on both sides.

    A share holds out the pairs of that part of the different prompts, always the same ones. A path is read as the
    held-out pairs, and the pairs of their prompts leave the training side.
    Raises UserError if a side is left empty.
    """
    if isinstance(held_out, str):
        held = load_pairs(held_out)
        texts = {pair.prompt for pair in held}
    else:
        prompts = [Prompt(text) for text in sorted({pair.prompt for pair in pairs})]
        texts = {prompt.text for prompt in splits.split(prompts, held_out, splits.SPLIT_SEED)[1]}
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
            raise UserError(f"aspect {name!r}: no training pair prefers a picture in it: give such pairs, or leave it "
                            "out")
    if all(verdict == 0.5 for pair in held for verdict in pair.verdicts.values()):
        raise UserError("held_out: none of the held-out pairs prefers a picture, so that accuracy cannot be measured: "
                        "hold out more")
    return names


def _pair(text: str, path: Path, line: int) -> Pair:
    try:
        record = decoded(text)
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
    chosen, rejected = (_picture(record.get(key), key, path, line) for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise _wrong(path, line, f"chosen and rejected are the same picture, {record['chosen']}")
    return Pair(prompt.strip(), chosen, rejected, _verdicts(record.get("aspects"), path, line))


def _picture(name: Any, key: str, path: Path, line: int) -> Path:
    if not isinstance(name, str) or not name:
        raise _wrong(path, line, f"expected the path of a picture under {key!r}, got {name!r}")
    if why := unfit(path.parent / name):
        raise _wrong(path, line, f"no picture at {path.parent / name}"
                     + ("" if why == "does not exist" else f": it {why}"))
    return path.parent / name


def _verdicts(given: Any, path: Path, line: int) -> dict[str, float]:
    if given is None:
        return {OVERALL: 1.0}
    if not isinstance(given, dict):
        raise _wrong(path, line, f"expected an object of names and verdicts under 'aspects', got {given!r}")
    for name, verdict in given.items():
        if not re.fullmatch(r"[\w-]+", name):
            raise _wrong(path, line, f"the aspect {name!r} is no name: expected letters, digits, _ and - alone")
        if not isinstance(verdict, str) or verdict not in WORTH:
            raise _wrong(path, line, f"aspect {name!r}: expected \"chosen\", \"rejected\" or \"tie\", got {verdict!r}")
    return {OVERALL: 1.0} | {name: WORTH[verdict] for name, verdict in given.items()}


def _wrong(path: Path, line: int, what: str) -> UserError:
    return UserError(f"pairs {path}, line {line}: {what}")
