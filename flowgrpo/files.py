"""Files that others wrote: regular ones alone, texts and headers of a limited size, JSON of a limited depth."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = (".safetensors", ".gguf", ".ckpt", ".pt", ".pth", ".bin")  # endings of files that a user may give as a model
HEADER = 2**24  # bytes of a safetensors file's header
DEEPEST = 64  # levels of lists and objects
DIGITS = 300  # of a number
_SURROGATE = re.compile("[\ud800-\udfff]")
_ADDRESS = re.compile(r"[a-z][a-z\d+.-]+:/|data:", re.I)  # a Path has one slash of two
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
          stat.S_IFDIR: "a folder"}


def address(path: str | Path) -> str | None:
    """Address that stands in the place of a path, such as https://host/a.png; None for a path."""
    text = str(path)
    return text[:200].replace(":/", "://", 1).replace(":///", "://", 1) if _ADDRESS.match(text) else None


def unfit(path: str | Path) -> str | None:
    """Why a path is no regular file, such as "is a FIFO"; None for a regular file, and a link to one. Reading a FIFO, a
    device or a socket may wait for ever."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL
        if address(path):  # one with its data is too long for a name
            return "is an address, expected a file: download it first"
        if isinstance(error, FileNotFoundError):
            return "does not exist"
        return f"cannot be opened ({getattr(error, 'strerror', None) or error})"
    kind = _KINDS.get(stat.S_IFMT(mode), "special")
    return None if stat.S_ISREG(mode) else f"is {kind}, expected a regular file"


def require_ending(path: Path, endings: tuple[str, ...], what: str) -> None:
    """Raise UserError for a path that is empty, an address, or of another ending. what: begins the error."""
    expected = f"expected a {', '.join(endings[:-1])}{' or ' * (len(endings) > 1)}{endings[-1]} file"
    if found := address(path):
        raise UserError(f"{what}: got the address {found}, {expected} of this machine: download it first")
    if not path.name:
        raise UserError(f"{what}: got no file name, {expected}")
    if path.suffix not in endings:
        raise UserError(f"{what} {path}: {expected}, got {path.suffix or 'no ending'!r}")


def at_home(text: str) -> str:
    """Path with the home folder in place of a leading ~ or ~NAME; any other text unchanged. A shell leaves the ~ of
    --output=~/runs as it is. Raises UserError for a user that the system does not know."""
    if not re.match(r"~[\w.-]*(/|$)", text) or text == "~":
        return text
    path = os.path.expanduser(text)
    if path == text:
        raise UserError(f"{text}: there is no user {text.partition('/')[0][1:]!r}: write ./{text} for a file of that "
                        "name")
    return path


def beside(file: Path, name: str) -> Path:
    """Path that a file names: relative to the file, or at home for one that begins with ~. Raises as `at_home`."""
    return file.parent / at_home(name)


def require_size(path: Path, most: int, what: str) -> None:
    """Raise UserError for a file of more than `most` bytes. what: begins the error."""
    size = path.stat().st_size
    if size > most:
        raise UserError(f"{what}: {size / 2**20:,.1f} MiB, expected {most / 2**20:,.0f} MiB at most: split it")


def text_of(path: str | Path, most: int = 2**26, what: str = "", binary: bool = False) -> str:
    """Text of a file. Raises UserError for one that is not regular, larger than `most` bytes or no UTF-8. what: begins
    the error. binary: a file of another form, which its own reader reads; "" stands for its text."""
    place = f"{what} {path}".lstrip()
    if why := unfit(path):
        raise UserError(f"{place}: {'no such file' if why == 'does not exist' else why}")
    require_size(Path(path), most, place)
    try:
        return "" if binary else Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from None
    except OSError as error:  # of a broken disk
        raise UserError(f"{place} cannot be read ({error.strerror or error})") from None


def tensors_of(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and the metadata of a safetensors file. Raises UserError for a file that is not regular or is damaged,
    and for a header of more than HEADER bytes."""
    with _header(path) as opened:
        return {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata() or {}  # noqa: SIM118


def metadata_of(path: str | Path) -> dict[str, str]:
    """Metadata of a safetensors file, by its header. Raises UserError as `tensors_of`."""
    with _header(path) as opened:
        return opened.metadata() or {}


def shapes_of(path: str | Path) -> dict[str, tuple[str, list[int]]]:
    """dtype, as in F32 or BF16, and shape of each tensor of a safetensors file. Raises UserError as `tensors_of`."""
    with _header(path) as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        return {key: (part.get_dtype(), part.get_shape()) for key, part in slices.items()}


@contextlib.contextmanager
def _header(path: str | Path) -> Iterator[Any]:
    """Context manager: an opened safetensors file."""
    from safetensors import safe_open

    if why := unfit(path):
        raise UserError(f"{path} {why}")
    with Path(path).open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if HEADER < size < Path(path).stat().st_size:
        raise UserError(f"{path}: a header of {size / 2**20:,.0f} MiB, expected {HEADER / 2**20:,.0f} MiB at most")
    try:
        with safe_open(path, "pt") as opened:
            yield opened
    except Exception as error:  # a broken file can raise anything
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())[:200]}): expected a .safetensors file"
                        ) from None


def unsafe(text: str, nul: bool = True) -> str | None:
    """The character that keeps a text from being a name or UTF-8, in words; None for none. nul: NUL counts too."""
    if nul and "\0" in text:
        return "a NUL character"
    return "half of a surrogate pair" if _SURROGATE.search(text) else None


def parse_json(text: str) -> Any:
    """Value of a JSON text. Raises json.JSONDecodeError, also for nesting deeper than DEEPEST, a number of more than
    DIGITS digits, a key that stands twice in an object, and half of a surrogate pair."""
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_int=_integer)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text, 0) from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error), text, 0) from None
    if text.count("[") + text.count("{") > DEEPEST:
        level = [value]
        for _ in range(DEEPEST):
            level = [inner for outer in level if isinstance(outer, (dict, list))
                     for inner in (outer.values() if isinstance(outer, dict) else outer)]
        if any(isinstance(inner, (dict, list)) for inner in level):
            raise json.JSONDecodeError("nested too deeply", text, 0)
    if "\\u" in text and unsafe(json.dumps(value, ensure_ascii=False), nul=False):
        raise json.JSONDecodeError("half of a surrogate pair", text, 0)
    return value


def json_of(text: str, place: str) -> Any:
    """Value of `parse_json`. Raises UserError that begins with the place."""
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not valid JSON: {error.msg} (column {error.colno})") from None


def json_lines(text: str, file: str) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line of a .jsonl file that is not blank. file: begins errors."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, json_of(line, f"{file}, line {number}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:60]!r} stands twice")
    return record


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
