"""Commands of the command line by their words, those of groups too."""

from __future__ import annotations

import functools
from typing import Any

import flowgrpo.cli  # noqa: F401 (declares all commands)
from flowgrpo.cli.root import program


@functools.cache
def commands() -> dict[str, Any]:
    """Every group and command by its words, such as `reward` and `reward train`."""
    found: dict[str, Any] = {}
    for name, command in program().commands.items():
        found[name] = command
        found |= {f"{name} {inner}": each for inner, each in getattr(command, "commands", {}).items()}
    return found


def leaf(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the words of the command that a line calls, and the rest of the line."""
    size = 1 if " ".join(arguments[:2]) not in commands() else 2
    return " ".join(arguments[:size]), arguments[size:]
