"""Targets of a pipeline's rollouts: what the loss scores. One class each, which owns sampling, record and replay."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from flowgrpo.methods import targets
from flowgrpo.methods.method import Method
from flowgrpo.objectives import surrogates
from flowgrpo.objectives.forward_process import OfNoised
from flowgrpo.objectives.sequence_losses import SampleLoss
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.rollouts.loss_inputs import EditInputs, LossInputs, NoisedInputs
from flowgrpo.samplers import joint_density, latent_edits, noised_finals, preview, reward_gradient
from flowgrpo.samplers.growth import explore, replay
from flowgrpo.samplers.rollout import Part, RolloutSpec, Seed
from flowgrpo.types import Scored, unwrap

Replayed = Iterator[tuple[int, slice, Scored]]


class RecordedSteps:
    """Stochastic steps of a rollout, by their log-probability. rollouts: `DenoisingRollouts`, which have a target."""

    policy: PipelinePolicy
    method: Method

    def __init__(self, rollouts: Any):
        self.rollouts, self.policy, self.method = rollouts, rollouts.policy, rollouts.method
        self.own: Any = rollouts.method.target
        self.pack = rollouts.config.train.pack

    @property
    def micro_batch(self) -> int:
        """Rows that go through the denoiser at once, now."""
        return self.rollouts.geometry.micro_batch

    @property
    def samples_per_prompt(self) -> int:
        """Samples that the pipeline draws per prompt, on all processes."""
        return self.rollouts.config.train.group

    def sample(self, conditioning: Conditioning, explorations: list[RolloutSpec], seed: Seed, judge: preview.Judge
               ) -> Iterator[Part]:
        """Sample a group per prompt: the parts as they are finished. judge: of clean predictions on the way."""
        pruned = self.method.denoising.pruning
        grower = None if pruned is None else partial(preview.PrunedGrower, pruned, judge)
        return explore(self.policy, conditioning, explorations, self.micro_batch, seed,
                       self.rollouts.together(len(conditioning.prompts)), grower)

    def record(self, part: Part, conditioning: Conditioning, epoch: int, seed: Seed) -> Part:
        """Sampled part with the transitions that are trained."""
        return part

    def score(self, part: Part, images: torch.Tensor, value: reward_gradient.Value | None) -> Part:
        """Part with what its decoded images [b,...] add. value: the reward whose gradient is followed."""
        return part

    def replay(self, part: Part, conditioning: Conditioning) -> Replayed:
        """Score a part's transitions under the present weights: (place in `part.transitions`, its rows, scores)."""
        return replay(self.policy, conditioning, part, self.micro_batch, self.pack)

    def loss_inputs(self, part: Part, conditioning: Conditioning, reference: Sequence[Scored]) -> LossInputs:
        """Function of every batch of the part's replay, for the surrogate's third argument."""
        surrogate = self.method.loss.surrogate
        if not isinstance(surrogate, (OfNoised, SampleLoss)):
            return lambda batch, k, rows, new, old: surrogates.surrogate_input(surrogate, new, old)
        if self.rollouts.split_groups is not None:
            return NoisedInputs(self.method.loss, part, reference, self.policy.device,
                                peers=self.rollouts.split_groups.peers(part, self.policy.device))
        most = max(len(taken.parent) for taken in part.transitions)
        cut = most > self.micro_batch or self.pack
        with self.policy.sampling():
            return NoisedInputs(self.method.loss, part, reference, self.policy.device,
                                (lambda: self.replay(part, conditioning)) if cut else None)

    def statistics(self, part: Part, conditioning: Conditioning, reference: Sequence[Scored]) -> list[torch.Tensor]:
        """Statistic [m] of every step's samples under the present weights, which the surrogate compares."""
        inputs = NoisedInputs(self.method.loss, part, reference, self.policy.device)
        with self.policy.sampling():
            return inputs.statistics(lambda: self.replay(part, conditioning))

    def steps(self, epoch: int) -> tuple[torch.Tensor, list[RolloutSpec]]:
        """Grid of the trained steps, and their explorations."""
        return self.rollouts.grid, self.rollouts.explorations(epoch)


class JointDensity(RecordedSteps):
    """All recorded steps of a sample as one decision, by their joint density (ReinFlow)."""

    def record(self, part: Part, conditioning: Conditioning, epoch: int, seed: Seed) -> Part:
        return joint_density.join_chains(part)

    def replay(self, part: Part, conditioning: Conditioning) -> Replayed:
        return joint_density.replay(self.policy, conditioning, part, self.micro_batch)


class NoisedFinals(RecordedSteps):
    """Final states noised to sampled times and scored by the old policy (DiffusionNFT and its variants)."""

    own: targets.NoisedFinals

    def times(self, epoch: int) -> RolloutSpec:
        alphas = self.policy.stock.alphas_cumprod.cpu() if self.policy.process == "vp" else None
        shape, seed = self.rollouts.geometry, self.rollouts.config.seed
        return unwrap(self.method.noising_spec(self.rollouts.grid, shape.group, epoch, seed, alphas))

    def record(self, part: Part, conditioning: Conditioning, epoch: int, seed: Seed) -> Part:
        with self.rollouts.clock("update"), self.rollouts.old_policy.old():
            return noised_finals.noise_finals(self.policy, conditioning, part, self.times(epoch), self.micro_batch,
                                              seed, self.own.times.shared, self.pack)

    def steps(self, epoch: int) -> tuple[torch.Tensor, list[RolloutSpec]]:
        times = self.times(epoch)
        return times.grid, [times]


class RewardGradient(RecordedSteps):
    """Reward gradient, followed back through the last denoising steps (DRaFT, AlignProp, ReFL)."""

    own: targets.RewardGradient

    def sample(self, conditioning: Conditioning, explorations: list[RolloutSpec], seed: Seed, judge: preview.Judge
               ) -> Iterator[Part]:
        [exploration] = explorations
        return reward_gradient.explore(self.policy, conditioning, exploration, self.own.backprop,
                                       self.micro_batch, seed, self.rollouts.together(len(conditioning.prompts)))

    def score(self, part: Part, images: torch.Tensor, value: reward_gradient.Value | None) -> Part:
        with self.rollouts.clock("reward"):
            return reward_gradient.score_images(part, images, unwrap(value), self.policy.device, self.micro_batch)

    def replay(self, part: Part, conditioning: Conditioning) -> Replayed:
        return reward_gradient.replay(self.policy, conditioning, part, self.own.backprop, self.micro_batch)


class LatentEdits(RecordedSteps):
    """Edits of final states by a small policy, and the critic's choice among them and their bases (EXPO)."""

    own: targets.LatentEdits
    policy: Any  # an `edits.EditPolicy`

    @property
    def samples_per_prompt(self) -> int:
        return self.own.edit.bases(self.rollouts.config.train.group)

    def record(self, part: Part, conditioning: Conditioning, epoch: int, seed: Seed) -> Part:
        exploration = self.own.edit.exploration(self.rollouts.config.train.group, self.method.denoising.solver,
                                                self.method.reads_means, self.method.reads_old_means)
        return latent_edits.apply_edits(self.policy.editor, conditioning, part, exploration, self.micro_batch, seed)

    def replay(self, part: Part, conditioning: Conditioning) -> Replayed:
        return replay(self.policy.editor, conditioning, part, self.micro_batch)

    def loss_inputs(self, part: Part, conditioning: Conditioning, reference: Sequence[Scored]) -> EditInputs:
        return EditInputs(self.policy.editor, conditioning, part, self.method.loss.surrogate.reads_means)

    def steps(self, epoch: int) -> tuple[torch.Tensor, list[RolloutSpec]]:
        return self.rollouts.grid, []  # edits are one step, which no transition of the pipeline weighs


TARGETS: dict[type[targets.Target], type[RecordedSteps]] = {
    targets.RecordedSteps: RecordedSteps, targets.JointDensity: JointDensity, targets.NoisedFinals: NoisedFinals,
    targets.RecordedPairs: NoisedFinals, targets.RewardGradient: RewardGradient, targets.LatentEdits: LatentEdits}
