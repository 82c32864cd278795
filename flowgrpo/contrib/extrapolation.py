"""Extrapolation of the path of a LoRA: jumps that save epochs, and are taken back where the reward falls.

A reconstruction of NExt (Low-rank Optimization Trajectories Modeling for LLM RLVR Acceleration).
"""

import math
from typing import Any

import torch
from torch import Tensor

from flowgrpo.contrib.features import ExtrapolationKeys
from flowgrpo.methods import capabilities
from flowgrpo.storage.checkpoint import Tensors, joined, within
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics, Run

RATES = torch.logspace(-3, 0.5, 141, dtype=torch.float64)  # of saturation per epoch; the least is nearly a line


def rank_one(path: Tensor) -> tuple[Tensor, Tensor]:
    """c [M] and u [n] of weights path [M,n]: c[t] u is the best rank-1 approximation of path[t] - path[0]."""
    apart = (path - path[0]).double()
    values, vectors = torch.linalg.eigh(apart @ apart.T)
    size = values[-1].clamp(min=0).sqrt()
    if size == 0:
        return torch.zeros(len(path), dtype=torch.float64), torch.zeros(path.shape[1], dtype=torch.float64)
    vector = vectors[:, -1] * (1 if vectors[-1, -1] >= 0 else -1)
    return vector * size, apart.T @ vector / size


def growth(c: Tensor, horizon: int) -> float:
    """By how much c grows in the next `horizon` epochs, by the curve a (1 - exp(-r t)) that fits c [M] best."""
    t = torch.arange(len(c), dtype=torch.float64)
    curves = -torch.expm1(-RATES[:, None] * t)
    a = (curves @ c) / curves.square().sum(1)
    best = int((a[:, None] * curves - c).square().sum(1).argmin())
    rate = RATES[best].item()
    return a[best].item() * (math.exp(-rate * (len(c) - 1)) - math.exp(-rate * (len(c) - 1 + horizon)))


class Extrapolation(Extension):
    """Weights of a run since the last jump: `path`, one snapshot per epoch.

    reward: the mean weighted reward of the present epoch; before: of the epoch before a jump. held: the weights before
    a jump whose next epoch is not trained yet.
    """

    name = "trajectory"
    asked_by = "train.extrapolate is {0.config.train.extrapolate}"
    # A path of all weights would be copies of them; rewards that judge a jump are of the weights behind it.
    needs = frozenset({capabilities.LORA, capabilities.PRESENT_WEIGHTS, capabilities.WHOLE_WEIGHTS})

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        settings = ExtrapolationKeys.read(trainer.config)
        self.every, self.horizon = settings.extrapolate_every, settings.extrapolate
        self.path: list[dict[str, Tensor]] = []
        self.held: dict[str, Tensor] = {}
        self.reward = self.before = 0.0

    def on_drawn(self, epoch: Epoch) -> None:
        self.reward = epoch.groups.totals.nanmean().item()

    def on_trained(self, epoch: Epoch) -> Metrics:
        """Jump, or judge the jump before the epoch. The metric is 1 for a jump, -1 for one that is taken back."""
        run, weights = self.trainer, self.trainer.policy.weights
        if self.held:
            worse = not self.reward >= self.before
            if worse:
                weights.load(self.held)
                run.log(f"epoch {run.epoch + 1}: reward {self.reward:.4g} after an extrapolation, {self.before:.4g} "
                        "before it: its weights are restored")
            self.held, self.path = {}, []
            if worse:
                return {"extrapolation": -1.0}
        self.path.append(weights.copy_for_average())
        if len(self.path) <= self.every:
            return {"extrapolation": 0.0}
        self.held, self.before = self.path[-1], self.reward
        jumped = {}
        for key, value in self.held.items():
            c, u = rank_one(torch.stack([snapshot[key] for snapshot in self.path]).flatten(1))
            jumped[key] = value + (growth(c.cpu(), self.horizon) * u).view(value.shape).to(value)
        weights.load(jumped)
        self.path = []
        return {"extrapolation": 1.0}

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        tensors = joined({**dict(enumerate(self.path)), "held": self.held})
        return tensors, {"path": len(self.path), "before": self.before}

    def load_state(self, tensors: Tensors, values: dict[str, Any]) -> None:
        place = self.trainer.policy.weights.place
        self.path = [place(within(tensors, f"{number}/")) for number in range(values.get("path", 0))]
        self.held, self.before = place(within(tensors, "held/")), values.get("before", 0.0)
