"""The arithmetic of a run's batch: computed once, refused in one line where it cannot work."""

from __future__ import annotations

from dataclasses import dataclass

from flowgrpo.config import Train
from flowgrpo.errors import UserError
from flowgrpo.samplers.rollout import prompts_per_part


@dataclass(frozen=True)
class Geometry:
    """prompts: P of this process; group: G; rows: B = P*G; parts: the whole groups that are sampled together, as many
    as a micro-batch holds and one at least; updates: optimiser steps per pass over them."""

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


def geometry(train: Train, processes: int = 1) -> Geometry:
    """Share a batch between processes. UserError names the nearest numbers that work."""
    if train.prompts % processes:
        low = max(train.prompts // processes, 1) * processes
        raise UserError(f"train.prompts is {train.prompts}, which {processes} processes cannot share evenly: "
                        f"use {low} or {low + processes}")
    found = Geometry(train.prompts // processes, train.group, train.micro_batch, train.updates)
    if train.updates > found.parts:
        smaller = f", or a micro_batch of {found.prompts // train.updates * found.group}"
        raise UserError(f"train.updates is {train.updates}, but {found.prompts} groups of {found.group} in micro-batches "
                        f"of {train.micro_batch} make {found.parts} parts: use at most {found.parts} updates"
                        f"{smaller if train.updates <= found.prompts else ''}")
    return found
