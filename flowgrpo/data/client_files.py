"""Refusal of files that a client names: a reward server opens none for its clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flowgrpo.errors import UserError

# A module's variable, since rewards also run in threads, to which a context variable is not passed on.
_closed = 0


@contextmanager
def closed() -> Iterator[None]:
    """Context manager, for every thread: `require_open` refuses."""
    global _closed
    _closed += 1
    try:
        yield
    finally:
        _closed -= 1


def require_open() -> None:
    """Raise UserError inside `closed`. Called before the first look at a file that metadata name."""
    if _closed:
        raise UserError("this reward reads files that the metadata name, and a reward server opens none of a client's: "
                        "use the reward in the run's own process")
