"""Reference that is another model for each source of prompts: several teachers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from flowgrpo.distributed.processes import Processes
from flowgrpo.objectives.references import Teachers
from flowgrpo.rollouts.base import GroupSampler
from flowgrpo.samplers.rollout import Part
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.kl_reference import KLReference, Snapshot
from flowgrpo.types import Scored


class TeachersReference(KLReference):
    """Each prompt has the teacher of its source; a part with prompts of several is scored once by each.

    snapshots: of the teachers, in their order. of: int64 [P], the teacher of each of this process's groups.
    """

    @property
    def _teachers(self) -> Teachers:
        return cast(Teachers, self.method.loss.reference)

    def start_epoch(self, drawn: Epoch, rollouts: GroupSampler[Any], epoch: int, epochs: int) -> None:
        super().start_epoch(drawn, rollouts, epoch, epochs)
        self.of = torch.tensor([self._teachers.place(prompt.metadata) for prompt in drawn.own], dtype=torch.int64)

    def next(self, held: list[Snapshot], epoch: int) -> list[Snapshot]:
        """Return the teachers' weights."""
        if not self.active:
            return []
        return held or [self.policy.weights.soup([path], ()) for _, path in self._teachers.models]

    def score_all(self, parts: list[Part], processes: Processes) -> None:
        """Do nothing: a part is scored when it is trained."""

    def scores(self, part: Part) -> list[Scored]:
        """Return the scores of a part's transitions by the teachers of their prompts."""
        if not self.is_read:
            return []
        if id(part) not in self.cached:
            scores = self._scored(part)
            if not self.keep:
                return scores
            self.cached[id(part)] = [score.to(self.policy.states) for score in scores]
        return self.cached[id(part)]

    def _scored(self, part: Part) -> list[Scored]:
        found: list[Scored] = []
        for number in self.of[part.prompts.cpu()].unique().tolist():
            with self.policy.reference(self.snapshots[number:number + 1]):
                replayed = [*self.replay(part)]
            own = [self.of[part.transitions[k].prompts[rows].cpu()] == number for k, rows, _ in replayed]
            scores = [score for _, _, score in replayed]
            found = [joined(*pair) for pair in zip(found, scores, own, strict=True)] if found else scores
        return found


def joined(one: Scored, other: Scored, rows: Tensor) -> Scored:
    """Return a score with these rows, bool [b], of another one."""
    def chosen(first: Tensor | None, second: Tensor | None) -> Tensor | None:
        if first is None or second is None or len(first) != len(rows):
            return first  # of all rows alike
        return torch.where(rows.to(first.device).view(-1, *[1] * (first.ndim - 1)), second, first)

    names: Sequence[str] = ("logp", "mean", "entropy")
    fields: dict[str, Any] = {name: chosen(getattr(one, name), getattr(other, name)) for name in names}
    std = one.std if one.std is None or one.std.ndim < 2 else chosen(one.std, other.std)
    return replace(one, **fields, std=std)
