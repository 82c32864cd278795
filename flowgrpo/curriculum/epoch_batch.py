"""Groups sampled in one epoch, over all rounds of dynamic sampling; some may be replaced by others."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes


@dataclass(eq=False)
class EpochBatch:
    """Groups of all processes so far, P of them in the order of drawing.

    pool: the training prompts.
    epoch, epochs, seed: of the run; epochs are counted from 0.
    memory: state of the method's parts between epochs.
    prompts: P of them.
    totals: [P,G], the weighted sums of rewards.
    replaced: indices of replaced groups.
    turns: the group indices of every turn.
    diversity: of every group, if the curriculum reads it.
    norms: of the gradients of each group's samples, [G] each, if the curriculum reads them.

    A method that samples a prompt several times has more groups than prompts, and one turn.
    """

    pool: Sequence[Prompt]
    epoch: int
    epochs: int
    seed: int
    processes: Processes
    memory: dict[str, Any] = field(default_factory=dict)
    prompts: list[Prompt] = field(default_factory=list)
    turns: list[range] = field(default_factory=list)
    diversity: list[float] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    replaced: set[int] = field(default_factory=set)
    _scores: list[Tensor] = field(default_factory=list)
    _totals: list[Tensor] = field(default_factory=list)

    @property
    def turn(self) -> int:
        """Number of turns so far."""
        return len(self.turns)

    @property
    def totals(self) -> Tensor:
        return torch.cat(self._totals)

    @property
    def first(self) -> Tensor:
        """Scores [P,G,R] of the first turn, before any replacement."""
        return self._scores[0]

    def standing(self) -> list[int]:
        """Indices of the groups that are not replaced."""
        return [place for place in range(len(self.prompts)) if place not in self.replaced]

    def add(self, batch: Sequence[Prompt], scores: Tensor, totals: Tensor, diversity: Sequence[float] = (),
            norms: Sequence[Tensor] = ()) -> None:
        """Add a turn of all processes: its prompts, their scores [P,G,R], totals [P,G], and diversity and norms, if
        known."""
        self.norms += norms
        self.diversity += diversity
        self.turns.append(range(len(self.prompts), len(self.prompts) + len(batch)))
        self.prompts += batch
        self._scores.append(scores)
        self._totals.append(totals)

    def replace(self, pairs: Sequence[tuple[int | None, Prompt]]) -> list[Prompt]:
        """The prompts of the next turn, each of which replaces a group, or adds one if its place is None.
        Their number is divisible by the number of processes; it may be 0."""
        pairs = pairs[:len(pairs) // self.processes.count * self.processes.count]
        self.replaced |= {place for place, _ in pairs if place is not None}
        return [prompt for _, prompt in pairs]

    def own(self) -> list[Prompt]:
        return [self.prompts[place] for place in self._own()]

    def prompts_and_scores(self) -> tuple[list[Prompt], Tensor]:
        """The prompts, process by process, and the scores [P,G,R] of their groups.
        A replaced group has NaN, so it is neither compared nor trained."""
        if self.turn == 1:
            return self.prompts, self._scores[0]
        scores = torch.cat(self._scores)
        scores[sorted(self.replaced)] = torch.nan
        order = self.processes.gather(torch.tensor(self._own()))
        return [self.prompts[place] for place in order.tolist()], scores[order]

    def metrics(self) -> dict[str, int]:
        extra = len(self.prompts) - len(self.replaced) - len(self.turns[0])
        return ({"redrawn_groups": len(self.replaced)} if self.replaced else {}) | (
            {"extra_groups": extra} if extra else {})

    def _own(self) -> list[int]:
        return [place for turn in self.turns for place in self.processes.own(turn)]
