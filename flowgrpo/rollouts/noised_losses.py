"""Losses of noised examples of a pipeline: flow matching, distillation of guidance, and pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from flowgrpo.errors import UserError
from flowgrpo.methods.supervised import GuidanceDistillation, NoisedData, PicturePairs
from flowgrpo.policies.pipelines.call import at_guidance
from flowgrpo.policies.pipelines.image_latents import ImageEncoder
from flowgrpo.rollouts.data_losses import DataLosses, Example, Run, conditioned, seed_of, summed
from flowgrpo.rollouts.denoising import DenoisingRollouts
from flowgrpo.samplers import noised_finals
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.samplers.scheduler import noise_like
from flowgrpo.types import Scored, wide


class NoisedLosses(DataLosses):
    """Errors of a pipeline's prediction at noised examples. run: of the pipeline."""

    def __init__(self, part: NoisedData, run: Run):
        self.part, self.run = part, run
        self.policy = cast(Any, run.policy)  # a pipeline
        if part.source.path and run.policy.modality != "image":
            raise UserError(f"parts.data.source.path is {part.source.path!r}, which brings images, but "
                            f"{type(self.policy.pipe).__name__} makes videos: leave it out")
        self.encoder = ImageEncoder(self.policy, "demonstrations")

    def divisor(self, examples: Sequence[Example]) -> int:
        return len(examples)

    def __call__(self, examples: Sequence[Example], places: Sequence[int], update: int) -> Iterator[Tensor]:
        policy, seed = self.policy, self.rollouts.config.seed
        prompts = [conditioned(self.part.condition, example) for example in examples]
        encoded = DenoisingRollouts.conditioning(self.rollouts, prompts)
        x0 = torch.cat([self._latent(example, encoded.rows(torch.tensor([row]))) for row, example in
                        enumerate(examples)]).to(policy.device)
        noise = noise_like(x0, policy.generators(seed_of(seed, update, place) for place in places))
        weights = torch.tensor([self.part.weight(example.reward) for example in examples])
        times = self.times(update)
        for k, t in enumerate(times.grid[:-1].tolist()):
            x, target = noised_finals.noised_states(x0, noise, t, policy.device, policy.process == "vp")
            if isinstance(self.part, GuidanceDistillation):
                target = self.teacher(encoded, x, times, k)
            with at_guidance(policy, self.part.guidance):
                output = policy.replay(encoded, x, times.grid, k, times.timesteps)
            yield (weights.to(output.device) * self.errors(output, target, t)).sum() / (len(times.grid) - 1)

    def times(self, update: int) -> RolloutSpec:
        """Return the times of an optimizer step."""
        alphas = self.policy.stock.alphas_cumprod.cpu() if self.policy.process == "vp" else None
        times = self.part.times(self.rollouts.grid, update, self.rollouts.config.seed)
        return noised_finals.exploration(times, 1, self.rollouts.method.denoising.solver, False, False, alphas)

    def errors(self, output: Tensor, target: Tensor, t: float) -> Tensor:
        """Return the error [B] of predictions [B,*D]; t: sigma, or the alpha-bar of a variance-preserving process."""
        output, target = wide(output, target)
        apart = output - target
        if self.part.space == "data":
            apart = apart * (((1 - t) / t)**0.5 if self.policy.process == "vp" else t)
        apart = apart.flatten(1)
        if self.part.distance == "squared":
            return apart.square().mean(1)
        return smooth_l1_loss(apart, torch.zeros_like(apart), reduction="none").mean(1)

    def teacher(self, encoded: Any, x: Tensor, times: RolloutSpec, k: int) -> Tensor:
        """Return the teacher's guided prediction [B,*D] at states of the k-th time."""
        assert isinstance(self.part, GuidanceDistillation)
        weights = self.policy.reference() if self.part.base else torch.no_grad()
        with weights, at_guidance(self.policy, self.part.scale):
            return self.policy.replay(encoded, x, times.grid, k, times.timesteps)

    def _latent(self, example: Example, row: Any) -> Tensor:
        if isinstance(example.content, Tensor):
            return example.content[None]
        return self.encoder(example.content, row)[0]


class PairNoisedLosses(NoisedLosses):
    """Preference loss of a pipeline on noised pairs of pictures."""

    part: PicturePairs

    def __call__(self, examples: Sequence[Example], places: Sequence[int], update: int) -> Iterator[Tensor]:
        half = max(1, self.rollouts.geometry.micro_batch // 2)  # a pair is two rows
        for start in range(0, len(examples), half):
            yield from self._of(examples[start:start + half], places[start:start + half], update)

    def _of(self, examples: Sequence[Example], places: Sequence[int], update: int) -> Iterator[Tensor]:
        """Yield the summed loss of some pairs at each time, over the number of times."""
        policy, loss = self.policy, self.part.loss
        prompts = [conditioned(self.part.condition, example) for example in examples]
        encoded = DenoisingRollouts.conditioning(self.rollouts, prompts).rows(
            torch.arange(len(examples)).repeat_interleave(2))
        files = [file for example in examples for file in (str(example.content), example.rejected)]
        x0 = torch.cat([self.encoder(file, encoded.rows(torch.tensor([row])))[0] for row, file in enumerate(files)]
                       ).to(policy.device)
        seeds = (seed_of(self.rollouts.config.seed, update, place) for place in places)
        noise = noise_like(x0[::2], policy.generators(seeds)).repeat_interleave(2, 0)
        times = self.times(update)
        for k, t in enumerate(times.grid[:-1].tolist()):
            x, target = noised_finals.noised_states(x0, noise, t, policy.device, policy.process == "vp")

            def scored() -> Scored:
                with at_guidance(policy, self.part.guidance):
                    output = policy.replay(encoded, x, times.grid, k, times.timesteps)
                logp = -self.errors(output, target, t)[:, None] / 2
                return Scored(logp, torch.ones_like(logp, dtype=torch.bool))

            reference = None
            if loss.reads_reference:
                with policy.reference():
                    reference = scored()
            yield summed(loss, scored(), reference, [example.reward for example in examples]) / (len(times.grid) - 1)
