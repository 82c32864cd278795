"""Rollout of latent edits (EXPO): base samples, edits, and their decisions."""

from __future__ import annotations

from collections.abc import Iterator

from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.rollouts import loss_inputs
from flowgrpo.rollouts.denoising import Explorer
from flowgrpo.samplers import latent_edits
from flowgrpo.samplers.replay import replay
from flowgrpo.samplers.rollout import Exploration, Part, Seed
from flowgrpo.types import Scored


class EditExplorer(Explorer):
    """Rollouts of the pipeline, and the edits of their finals as what is trained: a group is half bases, half edits."""

    def explorations(self, epoch: int) -> list[Exploration]:
        """An epoch's grid and solver, of the bases."""
        train = self.config.train
        return self.method.explorations(self.grid, train.group // 2, train.shift, epoch, self.config.seed,
                                        self.timesteps)

    def _trained(self, part: Part, conditioning: Conditioning, epoch: int, seed: Seed) -> Part:
        exploration = self.method.edit.exploration(self.config.train.group, self.method.solver,
                                                   self.method.reads_means)
        return latent_edits.edited(self.policy.editor, conditioning, part, exploration, self.geometry.micro_batch, seed)

    def replay(self, part: Part, conditioning: Conditioning) -> Iterator[tuple[int, slice, Scored]]:
        return replay(self.policy.editor, conditioning, part, self.geometry.micro_batch)

    def beside(self, part: Part, conditioning: Conditioning, reference: list[Scored]) -> loss_inputs.BesideEdits:
        return loss_inputs.BesideEdits(self.policy.editor, conditioning, part, self.method.surrogate.through > 0)

    def step_weights(self, parts: list[Part], epoch: int) -> dict[int, float]:
        """Edits are one step."""
        return {0: 1.0}
