"""The groups of an epoch while they are drawn, turn by turn: some of them may be replaced by others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes


class Drawn:
    """What all processes have drawn so far, P groups in the order of drawing.

    pool: the training prompts; epoch, counted from 0, epochs and seed: of the run; prompts: P of them; totals: [P,G],
    the weighted sums of rewards; replaced: places of groups whose place others took; turns: the places of every turn.
    A method that samples a prompt several times has more groups than prompts, and one turn.
    """

    def __init__(self, pool: Sequence[Prompt], epoch: int, epochs: int, seed: int, processes: Processes):
        self.pool, self.epoch, self.epochs, self.seed, self.processes = pool, epoch, epochs, seed, processes
        self.prompts: list[Prompt] = []
        self.turns: list[range] = []
        self.replaced: set[int] = set()
        self._scores: list[Tensor] = []
        self._totals: list[Tensor] = []

    @property
    def turn(self) -> int:
        """How many turns there were."""
        return len(self.turns)

    @property
    def totals(self) -> Tensor:
        return torch.cat(self._totals)

    @property
    def first(self) -> Tensor:
        """The scores [P,G,R] of the first turn: of prompts as they were drawn, whatever took their place."""
        return self._scores[0]

    def standing(self) -> list[int]:
        """The places of the groups that nothing has replaced."""
        return [place for place in range(len(self.prompts)) if place not in self.replaced]

    def add(self, batch: Sequence[Prompt], scores: Tensor, totals: Tensor) -> None:
        """A turn of all processes: its prompts, their scores [P,G,R] and totals [P,G]."""
        self.turns.append(range(len(self.prompts), len(self.prompts) + len(batch)))
        self.prompts += batch
        self._scores.append(scores)
        self._totals.append(totals)

    def replace(self, pairs: Sequence[tuple[int, Prompt]]) -> list[Prompt]:
        """The prompts of the next turn, each to take the place of a group: so many that all processes have as many, or
        none."""
        pairs = pairs[:len(pairs) // self.processes.count * self.processes.count]
        self.replaced |= {place for place, _ in pairs}
        return [prompt for _, prompt in pairs]

    def own(self) -> list[Prompt]:
        """This process's prompts, turn by turn."""
        return [self.prompts[place] for place in self._own()]

    def compared(self) -> tuple[list[Prompt], Tensor]:
        """The prompts, process by process, and the scores [P,G,R] of their groups: NaN where one was replaced, so that
        it is neither compared nor trained."""
        if self.turn == 1:
            return self.prompts, self._scores[0]
        scores = torch.cat(self._scores)
        scores[sorted(self.replaced)] = torch.nan
        order = self.processes.gather(torch.tensor(self._own()))
        return [self.prompts[place] for place in order.tolist()], scores[order]

    def metrics(self) -> dict[str, int]:
        """How many groups were replaced, where any was."""
        return {"redrawn_groups": len(self.replaced)} if self.replaced else {}

    def _own(self) -> list[int]:
        return [place for turn in self.turns for place in self.processes.own(turn)]
