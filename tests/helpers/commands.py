"""Commands of the command line by their words, those of groups too."""

import functools
import io
import json
from typing import Any

from flowgrpo.cli import main
from flowgrpo.cli.root import program


class Terminal(io.StringIO):
    """Stream of a person's terminal; as an input it has the typed answer."""

    def isatty(self) -> bool:
        return True


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


def refusal(capsys: Any, options: dict[str, Any], *arguments: object) -> str:
    """Return the one line by which `train` refuses options, which ends with exit code 2 before anything is loaded.

    options: by key, such as {"train.steps": 4}. arguments: a recipe's name before them.
    """
    given = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()]
    capsys.readouterr()
    assert main(["train", *map(str, arguments), *given]) == 2
    [line] = capsys.readouterr().err.strip().split("\n")
    assert line.startswith("flowgrpo: error: ")
    return line
