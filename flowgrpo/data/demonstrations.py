"""Demonstrations: recorded pictures or answers of prompts, for supervised terms.

A file of demonstrations is `.jsonl`, one object per line with `prompt` and either `picture` (a path, relative to the
file) or `text` (an answer). Optional are `reward`, a number (default 1), and `source`, the name of where it comes from.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo.data.prompts import LARGEST
from flowgrpo.errors import UserError, nearest
from flowgrpo.files import decoded, require_ending, require_size, unfit, unsafe

KEYS = ("prompt", "picture", "text", "reward", "source")


@dataclass(frozen=True)
class Demonstration:
    """Recorded output of a prompt: the path of a picture, or the text of an answer."""

    prompt: str
    picture: Path | None = None
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
        record = decoded(line)
    except json.JSONDecodeError as error:
        raise _wrong(path, number, f"not valid JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(record, dict):
        raise _wrong(path, number, f"expected an object with the keys prompt and picture or text, got {record!r}")
    for key in record:
        if key not in KEYS:
            raise _wrong(path, number, f"unknown key {key!r}{nearest(key, list(KEYS))}")
    if ("picture" in record) == ("text" in record):
        raise _wrong(path, number, "expected either 'picture' or 'text'")
    texts = {key: record[key] for key in ("prompt", "picture", "text", "source") if key in record}
    for key, value in {"prompt": None, **texts}.items():
        if not isinstance(value, str) or not value.strip():
            raise _wrong(path, number, f"expected a text under {key!r}, got {value!r}")
        if why := unsafe(value):
            raise _wrong(path, number, f"the text under {key!r} holds {why}")
    picture = path.parent / record["picture"] if "picture" in record else None
    if picture is not None and (why := unfit(picture)):
        raise _wrong(path, number, f"no image at {picture}" + ("" if why == "does not exist" else f": it {why}"))
    return Demonstration(record["prompt"].strip(), picture, record.get("text"),
                         _number(record.get("reward", 1.0), path, number), record.get("source", ""))


def _number(value: Any, path: Path, line: int) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _wrong(path, line, f"expected a number under 'reward', got {value!r}")
    return float(value)


def _wrong(path: Path, line: int, what: str) -> UserError:
    return UserError(f"demonstrations {path}, line {line}: {what}")
