"""Stock schedulers that draw noise, seeded by the call's generators, whether or not a pipeline hands these on."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any


@contextlib.contextmanager
def seeded(scheduler: Any, generator: Any) -> Iterator[None]:
    """Inside, `scheduler.step` reads `generator`, one or one per row, unless it is called with another.

    A FlowMatchLCMScheduler in a StableDiffusion3Pipeline, which passes no generator to it, would take torch's own: its
    pictures would depend on what else was drawn before.
    """
    if generator is None or "generator" not in inspect.signature(scheduler.step).parameters:
        yield
        return
    scheduler.step = partial(scheduler.step, generator=generator)
    try:
        yield
    finally:
        del scheduler.step
