"""Printing: a plain console, quiet libraries, phase timers."""

from __future__ import annotations

import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager: no library warns or logs; for calls whose warnings are known not to apply."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    levels = [(module, module.get_verbosity()) for module in (of_diffusers, of_transformers)]
    for module, _ in levels:
        module.set_verbosity(module.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for module, level in levels:
            module.set_verbosity(level)


class PhaseTimer:
    """Seconds per phase of an epoch: `with clock("rollout"): ...`; phase: the last one that began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.phase = ""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.phase = phase
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return the seconds by phase, as metrics, and begin anew."""
        taken = {f"seconds/{phase}": round(value, 4) for phase, value in self.seconds.items()}
        self.seconds.clear()
        return taken


def plain_console() -> Console:
    """Return a rich console without markup and emoji names, since names, paths and tasks are third-party text."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False)  # a pipe has no width
