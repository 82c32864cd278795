"""Batch arithmetic of a run: computed once, with a one-line error if it cannot work."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from flowgrpo.config.sections import Train
from flowgrpo.errors import UserError
from flowgrpo.nouns import quantity

T = TypeVar("T")


@dataclass
class BatchShape:
    """Batch sizes of one process.

    prompts: P of each process; where groups are split over processes, its number of slices.
    group: G; where groups are split, samples per slice.
    samples: B = P*G.
    micro_batch: rows that go through the denoiser at once; a run that is out of memory lowers it.
    parts: the number of whole groups sampled together, as many as a micro-batch holds and at least one.
    updates: optimizer steps per pass over them.
    slices: slices of every group, each of consecutive samples; 1 if groups are whole.
    sampled: the micro-batch with which the epoch's parts were sampled.
    generation_batch: completions that are drawn at once; a run that is out of memory lowers it too. 0: all.
    """

    prompts: int
    group: int
    micro_batch: int
    updates: int
    slices: int = 1
    sampled: int = 0
    generation_batch: int = 0

    def __post_init__(self) -> None:
        self.generation_batch = self.generation_batch or self.samples
        self.start_turn()

    def start_turn(self) -> None:
        """Sample parts with the present micro-batch from here on."""
        self.sampled = self.micro_batch

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @property
    def parts(self) -> int:
        return -(-self.prompts // prompts_per_part(self.group, self.micro_batch))

    @property
    def lowered_generation(self) -> int | None:
        """`generation_batch`, if it is not all of a turn."""
        return self.generation_batch if self.generation_batch < self.samples else None

    def repeat_per_slice(self, prompts: Sequence[T]) -> list[T]:
        """Prompt of every slice of their groups; the prompts themselves if groups are whole."""
        return [prompt for prompt in prompts for _ in range(self.slices)]

    def part_of(self, rank: int, first: int) -> int:
        """Number that puts the parts of all processes in order; slices of one part have the same. first: place of the
        part's first group or slice among those of the process."""
        if self.slices == 1:
            return (rank << 32) + first
        together = prompts_per_part(self.group * self.slices, self.sampled)
        return (rank * self.prompts + first) // (together * self.slices)

    def part_sizes(self, rank: int, count: int) -> list[int]:
        """Sizes of the parts of `count` groups or slices of a process. A slice is sampled with others of the part that
        one process would make of their groups."""
        together = prompts_per_part(self.group, self.sampled)
        if self.slices == 1:
            return [min(together, count - first) for first in range(0, count, together)]
        return [*Counter(self.part_of(rank, first) for first in range(count)).values()]


def geometry(train: Train, processes: int = 1) -> BatchShape:
    """Split a batch over processes: whole groups if they divide the prompts, or the samples of groups.

    An optimizer step trains whole parts. All processes, and a single one, must split the epoch's prompts at the same
    places; then any number of processes makes the same steps.
    Raises UserError with the nearest numbers that work.
    """
    if train.prompts * train.group % processes:
        unit = processes // math.gcd(processes, train.group)
        low = max(train.prompts // unit, 1) * unit
        raise UserError(f"train.prompts is {train.prompts} and train.group {train.group}, {train.prompts * train.group}"
                        f" samples that {processes} processes cannot share evenly: use {low} or {low + unit} prompts")
    share = train.prompts * train.group // processes
    size = math.gcd(share, train.group)
    shape = BatchShape(share // size, size, train.rows, train.updates, train.group // size,
                       generation_batch=train.generation_batch or 0)
    _require_updates(train, shape, processes)
    return shape


def teams(members: int, processes: int) -> int:
    """Number of teams of `members` processes that share their rows' tokens. Raises UserError for a remainder."""
    if processes % members:
        fits = [count for count in range(1, processes + 1) if processes % count == 0]
        raise UserError(f"memory.context_parallel is {members}, which does not divide the {processes} processes: use "
                        f"one of {', '.join(map(str, fits))}, or {members * (processes // members + 1)} processes")
    return processes // members


def _require_updates(train: Train, shape: BatchShape, processes: int) -> None:
    """Raise UserError for more optimizer steps than parts, or whole groups that processes part at other places."""
    together = prompts_per_part(train.group, train.rows)
    if shape.slices > 1:  # parts are those of one process
        shape = BatchShape(train.prompts, train.group, train.rows, train.updates)
        processes = 1
    if train.updates > shape.parts:
        smaller = f", or a micro_batch of {_fits(shape.prompts // train.updates, shape, processes) * shape.group}"
        raise UserError(f"train.updates is {train.updates}, but {quantity(shape.prompts, 'group')} of {shape.group} in "
                        f"micro-batches of {train.rows} make {quantity(shape.parts, 'part')}: use at most "
                        f"{quantity(shape.parts, 'update')}{smaller if train.updates <= shape.prompts else ''}")
    fits = _fits(together, shape, processes)
    if train.updates > 1 and fits < together:
        raise UserError(f"train.updates is {train.updates}, but micro-batches of {train.rows} take {together} "
                        f"groups of {train.group} together, which do not divide the {shape.prompts} prompts of each of "
                        f"{processes} processes evenly: use a micro_batch of {fits * train.group}")


def _fits(together: int, shape: BatchShape, processes: int) -> int:
    """Most prompts, at most `together`, that may make a part: of several processes a divisor of their P."""
    if processes == 1:
        return together
    return max((n for n in range(1, together + 1) if shape.prompts % n == 0), default=1)


def prompts_per_part(group: int, micro_batch: int) -> int:
    """Number of prompts sampled together: as many whole groups as a micro-batch holds, at least one."""
    return max(micro_batch // group, 1)
