"""JSON files: convert values to JSON, and read files back with one-line errors for damage."""

import hashlib
import json
import math
from pathlib import Path
from types import NoneType
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.files import unfit

GROUPS = ("reward/", "held_out/", "seconds/", "memory/")  # first parts of names of metrics that are numbers


def finite(value: Any) -> Any:
    """Null takes the place of a number without a JSON form, such as the mean of a reward that applied to no sample."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_object(path: Path, mend: str, **kinds: type) -> dict[str, Any]:
    """Read the JSON object in a file, with values of these types under these keys.
    mend: the fix at the end of the error.
    Raises UserError if the file holds something else."""
    if path.exists() and (why := unfit(path)):
        raise UserError(f"{path} is damaged (it {why}): {mend}")
    try:
        content = decode(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise UserError(f"{path} is damaged ({error}): {mend}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): {mend}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged (expected an object, got {str(content)[:60]}): {mend}")
    for key, kind in kinds.items():
        if not isinstance(content.get(key), kind):
            raise UserError(f"{path} is damaged (it has {str(content.get(key))[:60]} under {key!r}): {mend}")
    return content


def read_lines(path: Path, *numbers: str) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file that have numbers under these keys; none if there is no file.
    A last line that is still being written, or that a kill cut off, is skipped.
    Raises UserError with the line that is damaged: NaN and infinities are no JSON."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from None
    return [_line(path, number, line, numbers) for number, line in enumerate(lines, 1)]


def decode(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for one with NaN or an infinity, also as 1e999."""
    return json.loads(text, parse_constant=_number, parse_float=_number)


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return value


def json_digest(value: object) -> str:
    """SHA-256 of a value's JSON, whatever the order of its keys, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _line(path: Path, number: int, line: bytes, numbers: tuple[str, ...]) -> dict[str, Any]:
    try:
        record = decode(line.decode())
        if not isinstance(record, dict) or not all(isinstance(record.get(key), (int, float)) for key in numbers):
            raise ValueError(f"expected an object with numbers under {', '.join(numbers)}")
        for key, value in record.items():
            if key.startswith(GROUPS) and not isinstance(value, (int, float, NoneType)):
                raise ValueError(f"{key} is {str(value)[:60]!r}, expected a number")
        return record
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number}: damaged ({error}): remove that line") from None
