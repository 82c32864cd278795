"""Ranges of the fields of a method's parts."""

from __future__ import annotations


def at_least(part: object, least: float, *names: str) -> None:
    """Raise ValueError for the first of a part's fields that is not `least` or more."""
    for name in names:
        if not getattr(part, name) >= least:
            raise ValueError(f"{type(part).__name__}: {name} is {getattr(part, name)}, expected {least:g} or more")


def above(part: object, bound: float, *names: str) -> None:
    """Raise ValueError for the first of a part's fields that is not above `bound`."""
    for name in names:
        if not getattr(part, name) > bound:
            raise ValueError(f"{type(part).__name__}: {name} is {getattr(part, name)}, expected above {bound:g}")
