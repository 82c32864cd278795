"""Rewards that load their weights at their first call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

lazy: ContextVar[bool] = ContextVar("lazy", default=False)


@contextmanager
def lazily(on: bool = True) -> Iterator[None]:
    """Context manager: rewards made inside it load their weights at their first call. on: False changes nothing."""
    token = lazy.set(on or lazy.get())
    try:
        yield
    finally:
        lazy.reset(token)
