"""A call of a pipeline that ends as soon as its scheduler knows its steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any


class _Set(Exception):
    """The scheduler has its steps."""


@contextlib.contextmanager
def until_set(scheduler: Any) -> Iterator[None]:
    """Inside, a call of the pipeline ends without a word when it has set the steps of `scheduler`, which keeps them."""
    @functools.wraps(scheduler.set_timesteps)  # pipelines look at the arguments that it takes
    def set_timesteps(*args, **kwargs):
        own(*args, **kwargs)
        raise _Set

    own, scheduler.set_timesteps = scheduler.set_timesteps, set_timesteps
    try:
        with contextlib.suppress(_Set):
            yield
    finally:
        del scheduler.set_timesteps
