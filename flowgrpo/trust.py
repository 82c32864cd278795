"""Code that a command executes and addresses that it sends to: those of its command line and of your own recipes.

What a run's folder names needs --trust-run, and what a recipe from elsewhere names needs --trust."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowgrpo.errors import UserError

FLAG = "--trust-run"
RECIPE_FLAG = "--trust"
KEYS = {"key_env": "the key in", "token_file": "the token of the file"}  # arguments of rewards that send a secret
# Keys of folders that a run writes, and of files that a reward reads and may write.
WRITTEN = {"output": "writes to", "cache": "writes to", "file": "uses the file"}
_FILE = re.compile(r"(.+\.py):")
# Rewards that execute code of prompts' metadata or of completions.
_EXECUTING = ("code_run",)


@dataclass(frozen=True)
class Opening:
    """Command that opens runs. named: texts of its command line. files: Python files among them. said: notes."""

    named: frozenset[str]
    files: frozenset[Path]
    said: set[str] = field(default_factory=set)


# A module's variable, since rewards also run in threads, to which a context variable is not passed on.
_opening: Opening | None = None


@contextmanager
def opening(*named: object) -> Iterator[None]:
    """Context manager: until its end only files that the command line names are imported.

    named: values of the command line, also nested.
    """
    global _opening
    texts = frozenset(text for value in named for text in _texts(value))
    before, _opening = _opening, Opening(texts, frozenset(path for text in texts for path in _files(text)))
    try:
        yield
    finally:
        _opening = before


def require(file: Path, what: str) -> None:
    """Raise UserError for a file that is named by an opened run alone. file: its resolved path. what: for the error."""
    if _opening is not None and file not in _opening.files:
        raise UserError(f"{what}: a run's folder names this code, and opening a run executes none: name it on the "
                        f"command line, or add {FLAG} if you trust it")


def reaches_out(*named: object) -> bool:
    """Return True if an opened run's reward executes code or sends samples to an address, neither of which the command
    line names. named: the reward's name and arguments."""
    if _opening is None:
        return False
    return any((text in _EXECUTING or "://" in text) and text not in _opening.named
               or any(file not in _opening.files for file in _files(text))
               for value in named for text in _texts(value))


def remote_code(allowed: bool, run: Path) -> bool:
    """Return a run's `trust_remote_code`: False while a run is opened, which is printed."""
    if allowed and _opening is not None:
        log(f"{run}: trust_remote_code is not taken from a run's folder; {FLAG} takes it")
        return False
    return allowed


def require_own(recipe: object, values: Mapping[str, Any], given: Iterable[str], flag: str | None,
                written: Iterable[str] = ()) -> None:
    """Raise UserError if a recipe from elsewhere executes code, sends anything to an address, reads a key or a token,
    or writes outside of the working folder.

    recipe: its file. values: its keys, with `given`, the dotted ones of the command line, in place. flag: the command's
    option that allows it. written: further dotted keys of folders that a run writes.
    """
    own, folders = tuple(given), WRITTEN | dict.fromkeys(written, "writes to")
    found = [what for path, what in _reaches(values, folders)
             if not any(path == key or path.startswith(f"{key}.") for key in own)]
    if found:
        how = f"{flag} (from Python: trust=True) lets it" if flag else "copy it below the working folder to let it"
        raise UserError(f"{recipe} {'; '.join(found[:3])}: it is neither packaged nor below the working folder, so it "
                        f"may not: read it, and {how}")


def _reaches(value: object, folders: Mapping[str, str], path: str = "", key: object = "") -> Iterator[tuple[str, str]]:
    """Yield what a recipe's value makes a run do beyond training here: the value's dotted key, and words.

    key: the last one of `path`. folders: what a run does with keys of folders and files.
    """
    if isinstance(value, (Mapping, list)):
        for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            here = f"{path}.{name}".lstrip(".")
            yield from _of_text(str(name), here)
            yield from _reaches(inner, folders, here, name)
    elif key == "trust_remote_code" and value:
        yield path, "runs code that comes with a model (trust_remote_code)"
    elif key in KEYS and value is not None:
        yield path, f"sends {KEYS[str(key)]} {value} ({path})"
    elif isinstance(value, str):
        yield from _of_text(value, path)
        does = folders.get(path, folders.get(str(key)))
        if does and not Path(os.path.expanduser(value)).resolve().is_relative_to(Path.cwd()):
            yield path, f"{does} {value} ({path})"


def _of_text(text: str, path: str) -> Iterator[tuple[str, str]]:
    if _FILE.match(text) or text in _EXECUTING:
        yield path, f"executes code ({text})"
    elif "://" in text:
        yield path, f"sends samples to {text}"


def log(line: str) -> None:
    """Print a note to stderr, once per command."""
    if _opening is not None and line not in _opening.said:
        _opening.said.add(line)
        print(line, file=sys.stderr)


def _files(text: str) -> list[Path]:
    match = _FILE.match(text)
    return [Path(match[1]).resolve()] if match else []


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a value, also in its lists, keys and fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _texts(pair)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for inner in value:
            yield from _texts(inner)
    elif hasattr(value, "model_dump"):
        yield from _texts(value.model_dump())
