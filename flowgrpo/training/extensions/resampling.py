"""Groups that are sampled again, or under another input than the one that is learned (`parts.redraw`, `.expansion`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from flowgrpo.data.prompts import Prompt
from flowgrpo.methods import capabilities
from flowgrpo.methods.setup import Setup
from flowgrpo.samplers.rollout import Part
from flowgrpo.training import sampling
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension


class Resampling(Extension):
    """Turns of an epoch's draw, by the method's expansion and redraw."""

    @classmethod
    def missing(cls, setup: Setup) -> dict[str, str]:
        redraw, expansion = setup.method.redraw, setup.method.expansion
        lacks = {capabilities.ONE_DRAW: "parts.redraw, which replaces groups by their rewards"} if redraw else {}
        return lacks | ({capabilities.AS_LEARNED: "parts.expansion, whose samples are drawn under other prompts"}
                        if expansion else {})

    def draw_epoch(self) -> Epoch:
        trainer, redraw, epoch = self.trainer, self.trainer.method.redraw, sampling.new_epoch(self.trainer)
        batch = sampling.choose_prompts(trainer, trainer.epoch)
        begin = getattr(redraw, "begin", None)
        batch = self._expand(begin(batch, epoch.groups) if begin else batch)
        while batch:
            earlier, before = len(epoch.own), len(epoch.parts)
            new = sampling.draw_groups(trainer, epoch, batch)
            epoch.parts[before:] = self._shift_and_mark(new, epoch.own[earlier:], earlier)
            batch = self._expand(epoch.groups.replace(redraw(epoch.groups))) if redraw else []
        trainer.scoring.end_epoch()
        if learn := getattr(redraw, "learn", None):
            learn(epoch.groups)
        off = any(prompt.learned is not prompt for prompt in epoch.own)
        if epoch.groups.turn > 1 or off:
            epoch.conditioning = self._encode([prompt.learned for prompt in epoch.own])
        if off and trainer.method.target.scores_sampling:
            epoch.sampled = self._encode(epoch.own)
        return epoch

    def _shift_and_mark(self, parts: Sequence[Part], prompts: Sequence[Prompt], earlier: int) -> list[Part]:
        """The parts of a turn, behind the groups of earlier ones; decisions that were drawn under another input than
        the one that is learned are marked."""
        off = torch.tensor([prompt.learned is not prompt for prompt in prompts])
        if off.any() and self.trainer.method.target.scores_sampling:
            parts = [replace(part, transitions=tuple(replace(taken, old=replace(
                taken.old, guided=off[taken.prompts[taken.parent].cpu()].to(taken.old.logp.device)))
                for taken in part.transitions)) for part in parts]
        if earlier:  # groups, one per prompt
            parts = [replace(part, groups=range(part.groups.start + earlier, part.groups.stop + earlier),
                             prompts=part.prompts + earlier,
                             transitions=tuple(replace(taken, prompts=taken.prompts + earlier)
                                               for taken in part.transitions)) for part in parts]
        return [*parts]

    def _expand(self, batch: list[Prompt]) -> list[Prompt]:
        expansion = self.trainer.method.expansion
        return batch if expansion is None else expansion(batch)

    def _encode(self, prompts: list[Prompt]) -> Any:
        return self.trainer.rollouts.conditioning(prompts, self.trainer.epoch)
