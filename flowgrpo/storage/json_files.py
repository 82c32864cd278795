"""JSON files: convert values to JSON, and read files back with one-line errors for damage."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.files import unfit


def finite(value: Any) -> Any:
    """Return the value with null for numbers without a JSON form, such as the mean of a reward that applied to no
    sample."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_object(path: Path, mend: str, **kinds: type) -> dict[str, Any]:
    """Read the JSON object in a file, with values of these types under these keys.

    mend: the fix at the end of the error.
    Raises UserError if the file holds something else.
    """
    if path.exists() and (why := unfit(path)):
        raise UserError(f"{path} is damaged (it {why}): {mend}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise UserError(f"{path} is damaged ({error}): {mend}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged (expected an object, got {str(content)[:60]}): {mend}")
    for key, kind in kinds.items():
        if not isinstance(content.get(key), kind):
            raise UserError(f"{path} is damaged (it has {str(content.get(key))[:60]} under {key!r}): {mend}")
    return content


def read_lines(path: Path, *numbers: str) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file that have numbers under these keys; none if there is no file.

    A last line that is still being written, or that a kill cut off, is skipped.
    Raises UserError with the line that is damaged.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    return [_line(path, number, line, numbers) for number, line in enumerate(lines, 1)]


def _line(path: Path, number: int, line: bytes, numbers: tuple[str, ...]) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
        if isinstance(record, dict) and all(isinstance(record.get(key), (int, float)) for key in numbers):
            return record
        why = f"expected an object with numbers under {', '.join(numbers)}"
    except (ValueError, RecursionError) as error:
        why = str(error)
    raise UserError(f"{path}, line {number}: damaged ({why}): remove that line")
