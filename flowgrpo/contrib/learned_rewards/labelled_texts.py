"""Labelled texts: read them from a file, and degrade texts for a reward that prefers the originals.

A file of labelled texts is `.jsonl`, one object per line: `text` with `labels`, an object of names and numbers, or
`chosen` and `rejected`, two texts. Optional are `prompt`, whose lines are held out together, and `category`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo.data.prompts import LARGEST
from flowgrpo.errors import UserError, nearest
from flowgrpo.files import decoded, text_of, unsafe

KEYS = ("text", "labels", "chosen", "rejected", "prompt", "category")
OVERALL = "overall"
_STEPS, _NUMBER = re.compile(r"(?<=[.!?\n])\s+"), re.compile(r"\d+")


@dataclass(frozen=True)
class LabelledText:
    """Text with numbers by aspect, or that is preferred to `rejected`, which labels the aspect `overall`."""

    text: str
    labels: dict[str, float] = field(default_factory=dict, hash=False)
    rejected: str | None = None
    prompt: str = ""
    category: str = ""


def load_labelled(path: str | Path) -> list[LabelledText]:
    """Read a .jsonl file of labelled texts. Raises UserError with the file and the line of a mistake."""
    if Path(path).suffix != ".jsonl":
        raise UserError(f"labelled completions {path}: expected a .jsonl file")
    lines = text_of(path, LARGEST).split("\n")
    records = [_labelled(line, Path(path), number) for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise UserError(f"labelled completions {path}: the file holds no completion")
    if len({record.rejected is None for record in records}) == 2:
        raise UserError(f"labelled completions {path}: some lines have labels and some pairs, expected one kind")
    return records


def _labelled(line: str, path: Path, number: int) -> LabelledText:
    def wrong(what: str) -> UserError:
        return UserError(f"labelled completions {path}, line {number}: {what}")

    try:
        record = decoded(line)
    except json.JSONDecodeError as error:
        raise wrong(f"not valid JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(record, dict):
        raise wrong(f"expected an object, got {str(record)[:60]}")
    for key in record:
        if key not in KEYS:
            raise wrong(f"unknown key {key!r}{nearest(key, list(KEYS))}")
    if ("text" in record) == ("chosen" in record) or ("chosen" in record) != ("rejected" in record):
        raise wrong("expected either 'text', or 'chosen' and 'rejected'")
    for key in set(KEYS) & record.keys() - {"labels"}:
        if not isinstance(record[key], str) or not record[key].strip() or unsafe(record[key]):
            raise wrong(f"expected a text under {key!r}, got {str(record[key])[:60]!r}")
    labels = _labels(record.get("labels", {OVERALL: 1.0} if "text" in record else {}), wrong)
    return LabelledText(record.get("text") or record["chosen"], labels, record.get("rejected"),
                        record.get("prompt", ""), record.get("category", ""))


def _labels(labels: Any, wrong: Any) -> dict[str, float]:
    if not isinstance(labels, dict) or not all(
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            for value in labels.values()):
        raise wrong(f"expected names and numbers under 'labels', got {str(labels)[:60]}")
    return {name: float(value) for name, value in labels.items()}


def degraded(text: str, seed: int) -> str:
    """Return a text that argues worse: one of its sentences or lines left out, two of them exchanged, or a number
    changed, by the seed in turn; a text that has none of these loses its second half (Posterior-GRPO's degraded
    reasoning, by rules in place of a language model)."""
    rng, steps = np.random.default_rng(seed), [step for step in _STEPS.split(text) if step.strip()]
    numbers = [*_NUMBER.finditer(text)]
    for way in (seed % 3, (seed + 1) % 3, (seed + 2) % 3):
        if way == 0 and len(steps) > 1:
            place = int(rng.integers(len(steps)))
            return " ".join(steps[:place] + steps[place + 1:])
        if way == 1 and len(set(steps)) > 1:
            one = int(rng.integers(len(steps)))
            other = next(at % len(steps) for at in range(one + 1, one + len(steps)) if steps[at % len(steps)] !=
                         steps[one])
            steps[one], steps[other] = steps[other], steps[one]
            return " ".join(steps)
        if way == 2 and numbers:
            at = numbers[int(rng.integers(len(numbers)))]
            return text[:at.start()] + str(int(at[0]) + int(rng.integers(1, 10))) + text[at.end():]
    return text[:len(text) // 2]
