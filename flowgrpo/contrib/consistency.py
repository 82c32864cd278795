"""Consistency distillation beside a method (`parts.distil: ConsistencyDistillation`).

Samples of the epoch are noised to random times. There the student's velocity is drawn to that by which it says the same
data as an average of its own weights, one step of the teacher's trajectory further (`consistency_target`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flowgrpo.contrib.few_steps import FewStepStudent, denoiser_weights
from flowgrpo.errors import UserError
from flowgrpo.methods.distillation import ConsistencyDistillation, consistency_target
from flowgrpo.policies.pipelines.call import at_guidance
from flowgrpo.samplers import noised_finals
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Metrics, Run
from flowgrpo.training.memory import FULL, Measured
from flowgrpo.types import unwrap

TIMES, LEAST = 8, 0.02  # times of a batch, and the smallest one
NOISE = 1 / 11  # share of the times that are 1, pure noise


def add(phases: dict[str, dict[str, int]], measured: Measured) -> None:
    """Add the average of the student's weights, in all phases."""
    for parts in phases.values():
        parts["average"] = sum(each.numel() for each in denoiser_weights(measured.policy.weights.named).values()) * FULL


class ConsistentStudent(FewStepStudent):
    """samples: final samples [n, *D] of the epoch with their prompts [n]. average: of the student's weights over
    `averaged` steps."""

    name = "consistency"
    part: ConsistencyDistillation

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        if self.vp:
            raise UserError("parts.distil is ConsistencyDistillation, of a model that predicts noise: expected a flow "
                            "model; use DistributionMatching")
        self.average = {key: value.detach().clone() for key, value in self.live.items()}
        self.averaged = 0
        self.samples: tuple[Tensor, Tensor] | None = None
        self.measured = {"gap": []}

    def on_drawn(self, epoch: Epoch) -> None:
        self.samples = (torch.cat([part.finals[0] for part in epoch.parts]),
                        torch.cat([part.prompts for part in epoch.parts]))
        self.spec = unwrap(epoch.parts[0].exploration)
        self.conditioning, self.own = epoch.conditioning, epoch.own

    @torch.no_grad()
    def prepare(self) -> None:
        """Let the average follow the student of the last step."""
        share = 1 - min(self.part.decay, (1 + self.averaged) / (10 + self.averaged))
        torch._foreach_lerp_([*self.average.values()], [value.detach() for value in self.live.values()], share)
        self.averaged += 1

    def match(self, update: int) -> None:
        draw, (samples, of), grid = self.draws(0, update), unwrap(self.samples), self.times(update).grid
        places = torch.randperm(TIMES, generator=draw).repeat(-(-self.rows // TIMES))[:self.rows]  # of the grid, by row
        at = torch.randint(len(of), (self.rows,), generator=draw)
        noise = torch.randn(self.rows, *samples.shape[1:], generator=draw)
        vector = self.policy.vector(self.conditioning.rows(of[at[:1]]))
        # One call has rows of all times where the pipeline takes a time per row, otherwise of one.
        alike = [torch.arange(self.rows)] if vector else [(places == k).nonzero().flatten() for k in range(TIMES)]
        for rows in (part for each in alike for part in each.split(self.trainer.geometry.micro_batch) if len(part)):
            self._draw_to_average(samples[at[rows].to(samples.device)], of[at[rows]], noise[rows], grid,
                                  places[rows] if vector else int(places[rows[0]]))

    def _draw_to_average(self, samples: Tensor, of: Tensor, noise: Tensor, grid: Tensor, k: int | Tensor) -> None:
        """Add the gradient of the loss at samples [b, *D] of the prompts `of` [b], noised to the k-th times."""
        policy, encoded, device = self.policy, self.conditioning.rows(of), self.policy.device
        shape = (-1, *[1] * (samples.ndim - 1))
        s, after = (grid[place].view(shape).to(device) for place in (k, k + TIMES))
        x0, noise = samples.to(device), noise.to(device)
        x = ((1 - s) * x0.float() + s * noise).to(x0)
        with torch.no_grad():
            with self.base(), at_guidance(policy, self.part.scale):
                v = policy.replay(encoded, x, grid, k)
            with self.worn(self.average):
                u = policy.replay(encoded, (x - (s - after) * v).to(x), grid, k + TIMES)
            target = consistency_target(v, u, s, after)
        output = policy.replay(encoded, x, grid, k).to(target)
        losses = F.huber_loss(output, target, reduction="none", delta=self.part.delta).flatten(1).mean(1)
        self.measured["gap"].append((output.detach() - target).abs().mean())
        loss = self.part.weight * losses.sum()
        if self.part.ascent and self.rewarded:
            loss = loss - self.ascent((x - s * output).to(x), of, encoded)
        self.trainer.optimization.backward(loss / self.divisor)

    def times(self, number: int) -> RolloutSpec:
        """Grid of TIMES times, one of each of as many equal slices, then the times a jump of the teacher later."""
        spread = noised_finals.Stratified(TIMES)(unwrap(self.spec).grid, number, self.trainer.config.seed)
        times = (spread / (1 - NOISE)).clamp(LEAST, 1)
        after = (times - 1 / self.part.jumps).clamp(min=0)
        solver = self.trainer.method.denoising.solver
        return noised_finals.exploration(torch.cat([times, after]), 1, solver, False, False)

    def on_trained(self, epoch: Epoch) -> Metrics:
        self.samples = None
        return super().on_trained(epoch)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {f"average/{key}": value for key, value in self.average.items()}, {
            "averaged": self.averaged, "unscheduled": self.trainer.optimization.unscheduled}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        with torch.no_grad():
            for key, value in tensors.items():
                self.average[key.removeprefix("average/")].copy_(value)
        self.averaged = values.get("averaged", 0)
        self.trainer.optimization.unscheduled = values.get("unscheduled", 0)
