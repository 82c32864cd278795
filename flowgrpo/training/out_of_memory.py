"""Out of memory in a run: the failed phase is repeated with half the micro-batch, which later phases keep."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from flowgrpo.config.geometry import BatchShape
from flowgrpo.device import ran_out
from flowgrpo.distributed.processes import OutOfMemoryElsewhere, Processes
from flowgrpo.errors import UserError
from flowgrpo.training.run import Run

T = TypeVar("T")


def with_oom_retry(work: Callable[[], T], shape: BatchShape, processes: Processes, phase: Callable[[], str],
           say: Callable[[str], None]) -> T:
    """Return work(); each time that memory runs out, halve `shape.micro_batch` and repeat it from its beginning.

    work: leaves nothing behind if it fails. On several processes all fail alike, by `Processes.together`.
    phase: the name of the phase that failed.
    Raises UserError at a micro-batch of 1, and with sharded weights or context parallelism, whose processes share every
    call.
    """
    while True:
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            reason = why(error)
            place = "on another process" if isinstance(error, OutOfMemoryElsewhere) else f"in the {phase()}"
        if shape.micro_batch == 1 or processes.turns is not None or processes.members > 1:
            raise UserError(f"out of memory {place} with train.micro_batch {shape.micro_batch} ({reason}): "
                            f"{'lower it, ' if shape.micro_batch > 1 else ''}set train.checkpointing: true or another "
                            "of the options that docs/performance.md lists in order, or take a larger device")
        # Here the error and its frames are gone, and with them the tensors that they held.
        free()
        say(f"out of memory {place}: train.micro_batch {shape.micro_batch} -> {shape.micro_batch // 2} from "
            "here on")
        shape.micro_batch //= 2
        processes.parted = False


def why(error: BaseException) -> str:
    """Return the first line of an error that says that memory ran out."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def free() -> None:
    """Return unused memory to the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def report(trainer: Run, text: str) -> None:
    """Print that the micro-batch is halved; scores of the reference of larger batches are dropped."""
    trainer.kl_reference.cached = {}
    if trainer.processes.first:
        trainer.say(text)
