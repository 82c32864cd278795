"""The arithmetic of a run's batch: computed once, refused in one line where it cannot work."""

from __future__ import annotations

from dataclasses import dataclass

from flowgrpo.config import Train
from flowgrpo.errors import UserError


@dataclass(frozen=True)
class Geometry:
    """prompts: P of this process; group: G; rows: B = P*G; parts: micro-batches of this process's rollout; updates:
    optimiser steps per pass over them. A micro-batch that holds a group holds whole groups, which share their trunk."""

    prompts: int
    group: int
    micro_batch: int
    updates: int

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def parts(self) -> int:
        return -(-self.rows // self.micro_batch)


def geometry(train: Train, processes: int = 1) -> Geometry:
    """Share a batch between processes. UserError names the nearest numbers that work."""
    if train.prompts % processes:
        low = max(train.prompts // processes, 1) * processes
        raise UserError(f"train.prompts is {train.prompts}, which {processes} processes cannot share evenly: "
                        f"use {low} or {low + processes}")
    micro_batch = max(train.micro_batch // train.group * train.group, min(train.micro_batch, train.group))
    found = Geometry(train.prompts // processes, train.group, micro_batch, train.updates)
    if train.updates > found.parts:
        smaller = f", or a micro_batch of {found.rows // train.updates}" if train.updates <= found.rows else ""
        raise UserError(f"train.updates is {train.updates}, but {found.rows} rows in micro-batches of "
                        f"{micro_batch} make {found.parts}: use at most {found.parts} updates{smaller}")
    return found
