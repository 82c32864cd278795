"""Adaptive weights of several rewards, by their present influence: a part in place of `group.Advantage`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo.advantages.group import AdvantageRule, group_relative, require_clamp
from flowgrpo.types import Context, wide


@dataclass(frozen=True)
class Influence(AdvantageRule):
    """One advantage per reward, standardised in its group, then their sum under weights that `adapted` moves by `rate`.

    After the gradient-based weights of 2509.11452. There the inner products are those of gradients of all parameters,
    and the moves add up from epoch to epoch. Here they are those of gradients by the samples' log-probabilities, the
    advantages, and every batch starts from the recipe's weights. rate: 0 leaves these unchanged. The sum is clamped to
    +-clamp.
    """

    rate: float = 1.0
    clamp: float = 5.0

    def __post_init__(self) -> None:
        require_clamp(self.clamp)
        if not self.rate >= 0:
            raise ValueError(f"Influence: rate is {self.rate}, expected 0 or more")

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        (rewards,) = wide(rewards)
        weights = torch.as_tensor(weights, dtype=rewards.dtype, device=rewards.device)
        if rewards.ndim != 3 or weights.shape != rewards.shape[2:]:
            raise ValueError(f"rewards have shape {tuple(rewards.shape)} and weights {tuple(weights.shape)}, expected "
                             "[prompts, samples, rewards] and one weight per reward")
        advantages = torch.stack([group_relative(reward) for reward in rewards.unbind(2)], dim=2)
        return (advantages * adapted(advantages, weights, self.rate)).sum(2).clamp(-self.clamp, self.clamp)


def adapted(advantages: Tensor, weights: Tensor, rate: float) -> Tensor:
    """Return weights [R] after a step of mirror descent on their simplex: w_k exp(rate I_k), scaled to the sum they
    had.

    I_k = mean(A_k sum_j v_j A_j) over all samples, v the weights over their sum. It measures how far the common step
    raises reward k: 0 for a reward without variance in any group, below 0 for one that the others pull down.
    advantages: A [P, G, R].
    Raises ValueError for a weight below 0, or none above it.
    """
    if (weights < 0).any() or not weights.sum() > 0:
        raise ValueError(f"Influence: the weights are {weights.tolist()}, expected 0 or more, and one above")
    total = weights.sum()
    common = (advantages * (weights / total)).sum(2, keepdim=True)
    influence = (advantages * common).mean((0, 1))
    moved = weights * (rate * (influence - influence.max())).exp()
    return total * moved / moved.sum()
