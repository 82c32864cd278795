"""What commands print, and messages of refused calls and commands, each of them one line."""

import re

import pytest

from flowgrpo.cli import main
from flowgrpo.errors import UserError


def message(call, /, *arguments, error: type[BaseException] = UserError, **keywords) -> str:
    """Return what the error of a call says."""
    with pytest.raises(error) as caught:
        call(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def printed(capsys, *arguments: object) -> str:
    """Return what a command prints that ends well."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def error_line(capsys, *arguments: object) -> str:
    """Return the line that a command prints which exits with code 2; progress does not count."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr().err.split("\n")
    [line] = [line for line in said if line and "\r" not in line and not line.endswith(" ...")
              and not line.startswith("epoch ")]
    assert line.startswith("flowgrpo: error: ")
    return line


def only_line(capsys, *arguments: object) -> str:
    """Return the line of a command that exits with code 2 and prints nothing else, progress neither."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("flowgrpo: error: ")
    return captured.err


def refused(told: str, call, /, *arguments, error: type[BaseException] = UserError, **keywords) -> None:
    """Require that a call is refused in one line in which this pattern is found."""
    line = message(call, *arguments, error=error, **keywords)
    assert re.search(told, line), line
