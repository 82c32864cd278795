"""Recorded pairs in place of samples: nothing is drawn, and all else stays."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch

from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.log import PhaseTimer
from flowgrpo.methods.method import Method
from flowgrpo.methods.targets import RecordedPairs
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.image_latents import ImageEncoder
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.rollouts.base import TotalReward
from flowgrpo.rollouts.denoising import DenoisingRollouts
from flowgrpo.samplers.reward_gradient import Value
from flowgrpo.samplers.rollout import Part


class RecordedRollouts(DenoisingRollouts):
    """Pipeline under a method that trains finals: the group of a prompt is its recorded pair, encoded once."""

    @functools.cached_property
    def latents(self) -> ImageEncoder:
        return ImageEncoder(self.policy)

    def conditioning(self, batch: list[Prompt], epoch: int | None = None) -> Conditioning:
        pairs = [(prompt.metadata["chosen"], prompt.metadata["rejected"]) for prompt in batch]
        return replace(super().conditioning(batch, epoch), pairs=pairs)

    def sample(self, conditioning: Conditioning, epoch: int, judge: TotalReward, value: Value | None = None,
               turn: int = 0) -> Iterator[tuple[Part, list[torch.Tensor | None]]]:
        """Yield the pairs of the prompts, with their images [b,3,H,W] as the files have them. judge, value: unused."""
        self.old_policy.start_epoch(epoch)
        seed = self.seeds(epoch, turn, len(conditioning.prompts))
        for groups, prompts, _, _ in self.whole_groups(len(conditioning.prompts)):
            with self.clock("encode"):
                latents, images = zip(*(self.latents(path, conditioning.rows(torch.tensor([p])))
                                          for p in groups for path in conditioning.pairs[p]))
            part = Part(groups, prompts, None, (), (torch.cat(latents).to(self.policy.device),))
            yield self.target.record(part, conditioning, epoch, seed), [torch.stack(images)]


def make_rollouts(config: Config, policy: PipelinePolicy, method: Method, geometry: BatchShape, processes: Processes,
                  clock: PhaseTimer, first: Prompt) -> DenoisingRollouts:
    """Make what samples and replays a pipeline. first: a prompt, with which its own grid is read."""
    recorded = isinstance(method.target, RecordedPairs)
    if recorded and policy.modality != "image":
        raise UserError(f"preferences is set, which brings images, but {type(policy.pipe).__name__} makes videos")
    kind = RecordedRollouts if recorded else DenoisingRollouts
    return kind(config, policy, method, geometry, processes, clock, first)
