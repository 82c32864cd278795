"""Batch arithmetic of a run: computed once, with a one-line error if it cannot work."""

from __future__ import annotations

from dataclasses import dataclass

from flowgrpo.config.sections import Train
from flowgrpo.errors import UserError


@dataclass
class BatchShape:
    """Batch sizes of one process.

    prompts: P of each process.
    group: G.
    rows: B = P*G.
    micro_batch: rows that go through the denoiser at once; a run that is out of memory lowers it.
    parts: the number of whole groups sampled together, as many as a micro-batch holds and at least one.
    updates: optimiser steps per pass over them.
    """

    prompts: int
    group: int
    micro_batch: int
    updates: int

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def parts(self) -> int:
        return -(-self.prompts // prompts_per_part(self.group, self.micro_batch))


def geometry(train: Train, processes: int = 1) -> BatchShape:
    """Split a batch over processes.

    An optimiser step trains whole parts. All processes, and a single one, must split the epoch's prompts at the same
    places; then any number of processes makes the same steps.
    Raises UserError with the nearest numbers that work.
    """
    if train.prompts % processes:
        low = max(train.prompts // processes, 1) * processes
        raise UserError(f"train.prompts is {train.prompts}, which {processes} processes cannot share evenly: "
                        f"use {low} or {low + processes}")
    shape = BatchShape(train.prompts // processes, train.group, train.rows, train.updates)
    together = prompts_per_part(train.group, train.rows)
    if train.updates > shape.parts:
        smaller = f", or a micro_batch of {_fits(shape.prompts // train.updates, shape, processes) * shape.group}"
        raise UserError(f"train.updates is {train.updates}, but {shape.prompts} groups of {shape.group} in "
                        f"micro-batches of {train.rows} make {shape.parts} parts: use at most {shape.parts} "
                        f"updates{smaller if train.updates <= shape.prompts else ''}")
    fits = _fits(together, shape, processes)
    if train.updates > 1 and fits < together:
        raise UserError(f"train.updates is {train.updates}, but micro-batches of {train.rows} take {together} "
                        f"groups of {train.group} together, which do not part the {shape.prompts} prompts of each of "
                        f"{processes} processes evenly: use a micro_batch of {fits * train.group}")
    return shape


def _fits(together: int, shape: BatchShape, processes: int) -> int:
    """Return the most prompts, at most `together`, that may make a part: of several processes a divisor of their P."""
    if processes == 1:
        return together
    return max((n for n in range(1, together + 1) if shape.prompts % n == 0), default=1)


def prompts_per_part(group: int, micro_batch: int) -> int:
    """Return the number of prompts sampled together: as many whole groups as a micro-batch holds, at least one."""
    return max(micro_batch // group, 1)
