"""Arguments of the classes under TRL's names: a name that is none of them is an error with the nearest."""

from __future__ import annotations

import inspect
from typing import Any

from flowgrpo.errors import UserError, nearest

LISTED = 20  # arguments at most that an error lists


class UnknownArgument(UserError, TypeError):
    """Arguments of names that a class does not have."""


class NamedArguments:
    """Base of classes that raise UnknownArgument for all arguments of unknown names, before anything else is looked at.
    """

    def __new__(cls, *_: Any, **given: Any) -> Any:
        parameters = inspect.signature(cls.__init__).parameters.values()
        known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)][1:]
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            require_known(cls.__name__, list(given), known, f"help(flowgrpo.trl.{cls.__name__})")
        return super().__new__(cls)


def require_known(where: str, given: list[str], known: list[str], place: str) -> None:
    """Raise UnknownArgument for names that are not known, each with the nearest. place: of the list of all."""
    told = []
    for name in given:
        if name not in known:
            end = nearest(name, known)
            told.append(f"unknown argument {name!r}"
                        + (f"; {place} lists all" if len(known) > LISTED and end.startswith(";") else end))
    if told:
        raise UnknownArgument(f"{where}: {' '.join(told)}")
