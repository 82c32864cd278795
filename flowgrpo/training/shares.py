"""Shares of an epoch: which process samples what, and which optimizer step trains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowgrpo.config.geometry import BatchShape
from flowgrpo.distributed.processes import Processes
from flowgrpo.methods.parts import Reduction
from flowgrpo.objectives.reductions import TokenMean
from flowgrpo.samplers.rollout import Part


def whole_groups(values: Tensor, group: int) -> Tensor:
    """Return values of all slices in order [P*S,G/S,...] by whole groups: [P,G,...]."""
    return values.flatten(0, 1).unflatten(0, (-1, group))


def slices(values: Tensor, count: int) -> Tensor:
    """Return values [P,G,...] by the `count` S slices of each group: [P*S,G/S,...]."""
    return values if count == 1 else values.unflatten(1, (count, -1)).flatten(0, 1)


def moved(part: Part, by: int) -> Part:
    """Return the part of a later turn, shifted by the `by` groups of earlier turns, one per prompt."""
    transitions = tuple(replace(taken, prompts=taken.prompts + by) for taken in part.transitions)
    return replace(part, groups=range(part.groups.start + by, part.groups.stop + by), prompts=part.prompts + by,
                   transitions=transitions)


def shares(parts: list[Part], geometry: BatchShape, processes: Processes, reduction: Reduction
           ) -> list[tuple[list[Part], int]]:
    """Return the parts of each optimizer step on this process, and its number of decisions over all processes.

    A part is assigned to a step by its place among the parts of all processes, so their number changes no step. Slices
    of one part have one place.
    """
    numbers = [geometry.part_of(processes.rank, part.groups.start) for part in parts]
    everywhere = sorted(set(processes.gather(torch.tensor(numbers, dtype=torch.int64)).tolist()))
    steps = chunks(parts, geometry.updates, [everywhere.index(number) for number in numbers], len(everywhere))
    counts = processes.total([decisions(step, reduction) for step in steps])
    return list(zip(steps, counts))


def chunks(parts: list[Part], count: int, places: Sequence[int] | None = None, total: int | None = None
           ) -> list[list[Part]]:
    """Distribute `parts` over at most `count` optimizer steps, as evenly as possible.

    Of `total` parts these have the given places, by default all: part i goes to step i % count.
    """
    places = range(len(parts)) if places is None else places
    steps = min(count, len(parts) if total is None else total)
    return [[part for part, place in zip(parts, places) if place % count == step] for step in range(steps)]


def decisions(parts: list[Part], reduction: Reduction = TokenMean()) -> int:
    """Return the divisor of one optimizer step's loss: its trained decisions, or its rows."""
    return sum(reduction.count(transitions.old.mask) for part in parts for transitions in part.transitions)
