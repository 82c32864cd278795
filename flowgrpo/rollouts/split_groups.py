"""Groups whose samples lie on several processes: what a loss compares among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flowgrpo.config.geometry import BatchShape
from flowgrpo.distributed.processes import Processes
from flowgrpo.samplers.rollout import Part
from flowgrpo.types import GroupStatistics

COLUMNS = 6  # process, part, step, statistic, advantage, group


class SplitGroups:
    """Compared statistics of the samples of one optimizer step, on all processes."""

    def __init__(self, geometry: BatchShape, processes: Processes):
        self.geometry, self.processes = geometry, processes
        self.table = torch.empty(0, COLUMNS, dtype=torch.float64)

    def meet(self, statistics: Iterable[tuple[Part, Sequence[Tensor]]]) -> None:
        """Gather the statistics [m] of the recorded steps of this process's parts; all processes call it."""
        with self.processes.together():
            rows = [self._rows(part, k, values) for part, of in statistics for k, values in enumerate(of)]
        self.table = self.processes.gather(torch.cat([torch.empty(0, COLUMNS, dtype=torch.float64), *rows]))

    def peers(self, part: Part, device: torch.device) -> list[tuple[GroupStatistics, int]]:
        """Return for each recorded step of a part the samples of all processes, and the place of the part's first."""
        found = []
        for k, taken in enumerate(part.transitions):
            here = (self.table[:, 1] == self._number(part)) & (self.table[:, 2] == taken.step)
            process, _, _, statistic, advantage, group = self.table[here].unbind(1)
            of = GroupStatistics(statistic.float().to(device), advantage.to(part.advantages[k].dtype).to(device),
                                 group.long().to(device))
            found.append((of, int((process < self.processes.rank).sum())))
        return found

    def _rows(self, part: Part, k: int, statistic: Tensor) -> Tensor:
        """Return the rows of the table [m,COLUMNS] of the k-th recorded step."""
        taken = part.transitions[k]
        first = self.processes.rank * self.geometry.prompts
        groups = (first + taken.prompts[taken.parent].cpu()) // self.geometry.slices
        columns = [torch.full((len(groups),), value) for value in (self.processes.rank, self._number(part), taken.step)]
        return torch.stack([column.cpu().double() for column in (*columns, statistic, part.advantages[k], groups)], 1)

    def _number(self, part: Part) -> int:
        return self.geometry.part_of(self.processes.rank, part.groups.start)
