"""The loss of an edit policy with a critic beside it, and what goes together in a method with an edit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowgrpo.objectives import _cut, _ppo, _require_range
from flowgrpo.samplers.edits import Seen


@dataclass(frozen=True)
class ActorCritic:
    """PPO's clipped loss of the edit, and critic * (Q - R)^2 of the critic's value Q of every sample, base or edited,
    with the weighted sum R of its rewards; [B, 1] (EXPO, 2507.07986, in place of its gradient through Q).

    The two have no weights in common, and no gradient of Q reaches the edit.
    """

    low: float = 1e-3
    high: float = 1e-3
    critic: float = 0.5

    def __post_init__(self) -> None:
        _require_range("ActorCritic", self.low, self.high)
        if not self.critic > 0:
            raise ValueError(f"ActorCritic: critic is {self.critic}, expected above 0, the weight of the critic's loss")

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Seen) -> Tensor:
        error = (old.value - old.reward).square().to(log_ratio)
        return _ppo(log_ratio.expm1(), advantage, -self.low, self.high) + self.critic * error

    def clipped(self, log_ratio: Tensor, advantage: Tensor, old: Seen | None = None) -> Tensor:
        """Where the clip cuts the edit's gradient, bool [B, N]."""
        return _cut(log_ratio.expm1(), advantage, -self.low, self.high)


def require(method: Any, group: int) -> None:
    """ValueError where a method with an edit has parts that leave no place for one, or lacks those that go with it."""
    reads = isinstance(method.surrogate, ActorCritic)
    if method.edit is None:
        if reads:
            raise ValueError("the surrogate ActorCritic reads edits and their rewards: set parts.edit: {type: Edit}")
        return
    if not reads:
        raise ValueError(f"the surrogate {type(method.surrogate).__name__} trains no critic, which chooses between a "
                         "base and its edit: use ActorCritic")
    if group % 2:
        raise ValueError(f"train.group is {group}: half of the samples are bases, the others their edits: use an even "
                         "number")
    if method.backprop or method.preview or method.strides != (1,) or method.tuning.weight or method.lag.most \
            or method.noised(torch.linspace(1, 0, 9), group, 0, 0):
        raise ValueError("a method with an edit trains that alone, on plain rollouts: expected no backprop, preview or "
                         "lag, strides [1], tuning.weight 0, and times Recorded")
