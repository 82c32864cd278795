"""Code that a command executes: what its command line names, and what a run's folder names after --trust-run alone."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flowgrpo.errors import UserError

FLAG = "--trust-run"
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
        say(f"{run}: trust_remote_code is not taken from a run's folder; {FLAG} takes it")
        return False
    return allowed


def say(line: str) -> None:
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
