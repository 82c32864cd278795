"""Prompts of an epoch as they are sampled, and as their samples are learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.data.prompts import Prompt
from flowgrpo.rollouts.base import Encoded, GroupSampler
from flowgrpo.samplers.rollout import Part
from flowgrpo.training.shares import moved


class GuidedSampling:
    """Guidance of a run's prompts, by its method's expansion and redraw.

    prompts: of this process's groups in the epoch, turn by turn. drawn: the groups of all processes.
    """

    def __init__(self, rollouts: GroupSampler[Any]):
        self.rollouts, self.method = rollouts, rollouts.method
        self.prompts: list[Prompt] = []
        self.drawn: EpochBatch | None = None

    def first(self, batch: list[Prompt], drawn: EpochBatch) -> list[Prompt]:
        """Begin an epoch; return the prompts of its first turn as they are sampled."""
        self.prompts, self.drawn = [], drawn
        begin = getattr(self.method.redraw, "begin", None)
        return self._expanded(begin(batch, drawn) if begin else batch)

    def following(self) -> list[Prompt]:
        """Return the prompts of the next turn; none ends the epoch's sampling."""
        drawn, redraw = self._drawn, self.method.redraw
        return self._expanded(drawn.replace(redraw(drawn))) if redraw else []

    def take(self, parts: Sequence[Part], prompts: Sequence[Prompt]) -> list[Part]:
        """Return the parts of a turn of this process's prompts, behind those of the turns before.

        Decisions that were drawn under another input than the one that is learned are marked.
        """
        earlier, off = len(self.prompts), torch.tensor([prompt.learned is not prompt for prompt in prompts])
        self.prompts += prompts
        if off.any() and self.method.target.scores_sampling:
            parts = [replace(part, transitions=tuple(replace(taken, old=replace(
                taken.old, guided=off[taken.prompts[taken.parent].cpu()].to(taken.old.logp.device)))
                for taken in part.transitions)) for part in parts]
        return [moved(part, earlier) if earlier else part for part in parts]

    def end(self, conditioning: Encoded) -> Encoded:
        """End an epoch's sampling; return its prompts as the loss reads them. conditioning: of the last turn."""
        if learn := getattr(self.method.redraw, "learn", None):
            learn(self._drawn)
        return self._encoded([prompt.learned for prompt in self.prompts]) \
            if self._drawn.turn > 1 or self.off_policy else conditioning

    def sampled(self, conditioning: Encoded) -> Encoded:
        """Return the prompts under which old scores were computed. conditioning: as the loss reads them."""
        scored = self.off_policy and self.method.target.scores_sampling
        return self._encoded(self.prompts) if scored else conditioning

    @property
    def off_policy(self) -> bool:
        """Return True if a prompt of this process is sampled under another input than the one that is learned."""
        return any(prompt.learned is not prompt for prompt in self.prompts)

    @property
    def metadata(self) -> dict[str, dict[str, Any]]:
        """Return the metadata of the epoch's prompts of all processes, by key."""
        return {prompt.key: prompt.metadata for prompt in self.drawn.prompts} if self.drawn else {}

    @property
    def _drawn(self) -> EpochBatch:
        assert self.drawn is not None, "the epoch has not begun"
        return self.drawn

    def _expanded(self, batch: list[Prompt]) -> list[Prompt]:
        return batch if self.method.expansion is None else self.method.expansion(batch)

    def _encoded(self, prompts: list[Prompt]) -> Encoded:
        return self.rollouts.conditioning(prompts, self._drawn.epoch)
