"""Printing: a plain console, progress of long work, quiet libraries, phase timers.

Progress is on stderr: bars and spinners in a terminal, plain lines in a file or a pipe.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from flowgrpo.notebook import Cell, in_notebook

if TYPE_CHECKING:
    import torch
    from rich.console import Console

FIRST, EVERY = 10.0, 60.0  # seconds to the first plain line of a bar, and between lines
LINE = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"


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


@contextmanager
def silence_errors(package: str) -> Iterator[None]:
    """Context manager: drop the errors that a package logs with `logging.error`; it raises them too."""
    def others(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or Path(record.pathname).parent.name != package

    root = logging.getLogger()
    root.addFilter(others)
    try:
        yield
    finally:
        root.removeFilter(others)


# Loggers of libraries, and what they say in every run that no user can change.
NOISY = (
    "torch.utils._pytree",  # torchao's enumerations
    "torchao",
    "bitsandbytes.backends.cpu.ops",  # a kernel of a package that is not needed
    "transformers.tokenization_utils_base",  # prompts longer than an encoder's limit, which a run counts itself
    "diffusers.quantizers.torchao.torchao_quantizer",
    "huggingface_hub.utils._http",  # each of its trials
)


def silence() -> None:
    """Let the NOISY loggers print errors alone, in this process."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


class PhaseTimer:
    """Seconds per phase of an epoch: `with clock("rollout"): ...`.

    events: they are seconds between two events of this process's CUDA device, waits for the host included, in place of
    the host's. phase: the last one that began.
    """

    def __init__(self, events: bool = False) -> None:
        self.events = events
        self.seconds: dict[str, float] = defaultdict(float)
        self.phase = ""
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.phase = phase
        begun = _record_event() if self.events else None
        start = time.perf_counter()
        try:
            yield
        finally:
            if begun is None:
                self.seconds[phase] += time.perf_counter() - start
            else:
                self._spans.append((phase, begun, _record_event()))

    def pop(self) -> dict[str, float]:
        """Seconds by phase, as metrics, and begin anew. Waits for the GPU's last event."""
        if self._spans:
            self._spans[-1][2].synchronize()
        for phase, begun, ended in self._spans:
            self.seconds[phase] += begun.elapsed_time(ended) / 1000  # it is in milliseconds
        taken = {f"seconds/{phase}": round(value, 4) for phase, value in self.seconds.items()}
        self.seconds.clear()
        self._spans.clear()
        return taken


def _record_event() -> torch.cuda.Event:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def plain_console() -> Console:
    """Rich console without markup and emoji names, since names, paths and tasks are third-party text."""
    from rich.console import Console

    # A pipe has no width, and in a notebook each line would be an output of its own.
    return Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False, force_jupyter=False)


class Lines:
    """File of a bar that keeps no cursor: each state is a line of its own on stderr."""

    def write(self, text: str) -> None:
        """Write a state; an empty one clears a bar, which a line needs not."""
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Do nothing: each line is flushed."""


def bar(items: Iterable[Any] | None = None, *, title: str, unit: str = "it", total: int | None = None, done: int = 0,
        shown: bool = True) -> tqdm:
    """Progress bar, which is cleared at its end.

    done: what was there before it began. shown: False in processes that print nothing.
    In a notebook: one output that each state replaces. Without a terminal: a line after FIRST seconds, then one every
    EVERY seconds.
    """
    common: Any = dict(total=total, initial=done, desc=title, unit=unit, leave=False)
    if not shown or in_terminal():
        return tqdm(items, **common, disable=not shown)
    if in_notebook():
        return tqdm(items, **common, file=Cell(), mininterval=0.5, ncols=100)
    made = tqdm(items, **common, file=Lines(), delay=FIRST, mininterval=EVERY, maxinterval=EVERY, miniters=1,
                smoothing=0, bar_format=LINE)
    made.last_print_t = time.time() - (EVERY - FIRST)
    return made


@contextmanager
def status(text: str) -> Iterator[Any]:
    """Context manager: show what the command does, beside a spinner in a terminal. Yields what replaces the text."""
    from rich.console import Console

    if in_terminal():
        with Console(stderr=True, markup=False, highlight=False).status(text) as spinner:
            yield spinner.update
    else:
        print(f"{text} ...", file=sys.stderr, flush=True)
        yield lambda _: None


def in_terminal() -> bool:
    """True if stderr is a terminal that has a size; a bar prints nothing where it has none."""
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError, AttributeError):
        return False
