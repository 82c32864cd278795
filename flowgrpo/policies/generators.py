"""Generators of rows, and stock schedulers that draw noise from them, whether or not a pipeline hands these on."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch


def generators(seeds: Iterable[int]) -> list[torch.Generator]:
    """Return one CPU generator per row, so that what is drawn does not depend on device, process or micro-batch."""
    return [torch.Generator().manual_seed(int(seed)) for seed in seeds]


@contextlib.contextmanager
def seeded(scheduler: Any, generator: torch.Generator | Sequence[torch.Generator] | None) -> Iterator[None]:
    """Context manager: `scheduler.step` reads `generator`, one or one per row, unless it is called with another.

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
