"""What a surrogate reads beside ratio and advantage, batch by batch of a part's replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowgrpo import objectives
from flowgrpo.objectives.forward_process import OfNoised
from flowgrpo.samplers.rollout import Part
from flowgrpo.types import Noised, Peers, Scored

Replay = Callable[[], Iterator[tuple[int, slice, Scored]]]


class Beside:
    """Of recorded steps `objectives.beside`, of noised samples a `Noised`.

    reference: its scores of the replay's batches, where anything reads them. cut: a replay of the same batches, where
    they cut groups; a surrogate that compares the samples of a group then sees all of it in a first pass, without
    gradients, which costs a forward per sample. Without it every batch holds whole groups.
    """

    def __init__(self, surrogate: Any, part: Part, reference: Sequence[Scored], device: torch.device,
                 cut: Replay | None = None):
        self.surrogate, self.part, self.reference, self.device = surrogate, part, reference, device
        groups = getattr(surrogate, "of_groups", False)
        self.peers = self._seen(cut) if groups and cut else [None] * len(part.transitions)

    def __call__(self, batch: int, k: int, rows: slice, new: Scored, old: Scored) -> Tensor | Noised:
        """What is read of the rows of the k-th recorded step, the replay's batch of that number."""
        if not isinstance(self.surrogate, OfNoised):
            return objectives.beside(self.surrogate, new, old)
        noised = self._noised(batch, k, rows, new, old)
        if not self.surrogate.of_groups:
            return noised
        peers = self.peers[k] or self._peers(k, self.surrogate.gap(noised).detach())
        return replace(noised, peers=peers)

    def _noised(self, batch: int, k: int, rows: slice, new: Scored, old: Scored) -> Noised:
        taken = self.part.transitions[k]
        reference = self.reference[batch].to(self.device) if self.surrogate.of_reference else None
        return Noised(self.part.exploration.grid[taken.step].item(), new, old, taken.x_next[rows].to(self.device),
                      torch.arange(rows.start, rows.stop, device=self.device), reference)

    def _seen(self, replay: Replay) -> list[Peers]:
        """The peers of every step, from the present weights."""
        gaps: list[list[Tensor]] = [[] for _ in self.part.transitions]
        for batch, (k, rows, new) in enumerate(replay()):
            old = self.part.transitions[k].old.rows(rows).to(self.device)
            gaps[k].append(self.surrogate.gap(self._noised(batch, k, rows, new, old)).detach())
        return [self._peers(k, torch.cat(each)) for k, each in enumerate(gaps)]

    def _peers(self, k: int, gap: Tensor) -> Peers:
        taken, advantage = self.part.transitions[k], self.part.advantages[k]
        assert len(gap) == len(advantage), "the batch holds a part of a group, and there was no first pass"
        return Peers(gap.flatten(), advantage.to(self.device), taken.prompts[taken.parent].to(self.device))
