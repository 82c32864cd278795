"""Group-relative advantages: pure functions on rewards [P, G], P prompts with G samples each.

NaN means that a reward does not apply to a sample: it is left out of every statistic, and its advantage is 0.
A group counts as having no variance when its deviation is at most 1e-6 of its largest absolute reward: below that,
float32 rewards differ by rounding alone, and dividing by the deviation would train on the rounding. Its advantages
are 0 at every scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo.types import wide

RELATIVE_NOISE = 1e-6
SCALES = ("group", "batch", "none")
ORDERS = ("advantages", "rewards")


@dataclass(frozen=True)
class Advantage:
    """`combine` with its settings, the part of a method: rewards [P, G, R] and weights [R] to advantages [P, G]."""

    scale: str = "group"
    order: str = "advantages"
    clamp: float = 5.0

    def __post_init__(self) -> None:
        _require_one_of("scale", self.scale, SCALES)
        _require_one_of("order", self.order, ORDERS)
        if not self.clamp > 0:
            raise ValueError(f"clamp is {self.clamp}, expected above 0 (infinity for none)")

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float]) -> Tensor:
        return combine(rewards, weights, self.scale, self.order, self.clamp)


def group_relative(rewards: Tensor, scale: str = "group") -> Tensor:
    """Rewards [P, G] less their group's mean, over a deviation plus eps: [P, G], float32 or wider.

    scale: "group", the group's own deviation, ddof 1, eps 1e-8 (DanceGRPO, MixGRPO); "batch", the deviation of all
    P*G rewards, ddof 0, eps 1e-4 (Flow-GRPO): pass the rewards of all processes; "none", no division (Dr. GRPO).
    """
    _require_one_of("scale", scale, SCALES)
    (rewards,) = wide(rewards)
    if rewards.ndim != 2:
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}, expected [prompts, samples per prompt]")
    advantages = _centred(rewards)
    if scale == "group":
        advantages = advantages / (_group_std(rewards)[:, None] + 1e-8)
    if scale == "batch":
        spread = (rewards - rewards.nanmean()).square().nanmean().sqrt()
        advantages = advantages / (spread + 1e-4)
    return advantages.masked_fill(zero_variance(rewards)[:, None], 0)


def combine(
    rewards: Tensor,
    weights: Tensor | Sequence[float],
    scale: str = "group",
    order: str = "advantages",
    clamp: float = 5.0,
) -> Tensor:
    """Several rewards [P, G, R], weighted by `weights` [R], as one advantage [P, G] within +-clamp.

    order: "advantages", one advantage per reward, then their weighted sum (MixGRPO 2507.21802, DanceGRPO 2505.07818);
    "rewards", the weighted sum of rewards, then one advantage (Flow-GRPO 2505.05470). There a missing reward stands at
    its group's mean, so that having it or not moves no sample; a sample with none at all is left out.
    """
    _require_one_of("order", order, ORDERS)
    (rewards,) = wide(rewards)
    weights = torch.as_tensor(weights, dtype=rewards.dtype, device=rewards.device)
    if rewards.ndim != 3 or weights.shape != rewards.shape[2:]:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)} and weights {tuple(weights.shape)}, "
            "expected [prompts, samples, rewards] and one weight per reward"
        )
    if order == "advantages":
        each = torch.stack([group_relative(reward, scale) for reward in rewards.unbind(2)], dim=2)
        advantages = (each * weights).sum(dim=2)
    else:
        advantages = group_relative(_weighted_sum(rewards, weights), scale)
    return advantages.clamp(-clamp, clamp)


def zero_variance(rewards: Tensor) -> Tensor:
    """Which groups of rewards [P, G] say nothing, having no variance or fewer than two applicable rewards: bool [P]."""
    (rewards,) = wide(rewards)
    largest = rewards.abs().nan_to_num(0).amax(dim=1)
    return _group_std(rewards) <= RELATIVE_NOISE * largest


def _centred(rewards: Tensor) -> Tensor:
    """Rewards less their group's mean, 0 where not applicable."""
    return (rewards - rewards.nanmean(dim=1, keepdim=True)).masked_fill(rewards.isnan(), 0)


def _group_std(rewards: Tensor) -> Tensor:
    """The deviation of each group's applicable rewards, ddof 1, 0 for fewer than two: [P]."""
    others = (~rewards.isnan()).sum(dim=1) - 1
    return (_centred(rewards).square().sum(dim=1) / others.clamp(min=1)).sqrt()


def _weighted_sum(rewards: Tensor, weights: Tensor) -> Tensor:
    missing = rewards.isnan()
    means = rewards.nanmean(dim=1, keepdim=True).nan_to_num(0)
    total = (torch.where(missing, means, rewards) * weights).sum(dim=2)
    return total.masked_fill(missing.all(dim=2), torch.nan)


def _require_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")
