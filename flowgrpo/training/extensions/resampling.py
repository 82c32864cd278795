"""Groups that are sampled again, or under another input than the one that is learned (`parts.redraw`, `.expansion`)."""

from dataclasses import replace
from typing import Any

import torch

from flowgrpo.data.prompts import Prompt
from flowgrpo.methods import capabilities
from flowgrpo.methods.setup import Setup
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
            # Decisions that were drawn under another input than the one that is learned are marked.
            off = torch.tensor([prompt.learned is not prompt for prompt in epoch.own[earlier:]])
            if off.any() and trainer.method.target.scores_sampling:
                new = [replace(part, transitions=tuple(replace(taken, old=replace(
                    taken.old, guided=off[taken.prompts[taken.parent].cpu()].to(taken.old.logp.device)))
                    for taken in part.transitions)) for part in new]
            # A turn is behind the groups of earlier ones; a prompt has one group.
            epoch.parts[before:] = [part.shifted(earlier, earlier) for part in new]
            batch = self._expand(epoch.groups.replace(redraw(epoch.groups))) if redraw else []
        trainer.scoring.end_epoch()
        if learn := getattr(redraw, "learn", None):
            learn(epoch.groups)
        rewritten = any(prompt.learned is not prompt for prompt in epoch.own)
        if epoch.groups.turn > 1 or rewritten:
            epoch.conditioning = self._encode([prompt.learned for prompt in epoch.own])
        if rewritten and trainer.method.target.scores_sampling:
            epoch.sampled = self._encode(epoch.own)
        return epoch

    def _expand(self, batch: list[Prompt]) -> list[Prompt]:
        expansion = self.trainer.method.expansion
        return batch if expansion is None else expansion(batch)

    def _encode(self, prompts: list[Prompt]) -> Any:
        return self.trainer.rollouts.conditioning(prompts, self.trainer.epoch)
