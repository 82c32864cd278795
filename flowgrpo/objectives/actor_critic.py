"""The loss of an edit policy with a critic beside it, and what goes together in a method with an edit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowgrpo.objectives.surrogates import cut, ppo, require_range
from flowgrpo.parts.paired import Paired
from flowgrpo.samplers.edits import Seen


@dataclass(frozen=True)
class ActorCritic:
    """What an edit and its critic are trained by; [B, 1] (EXPO, 2507.07986).

    The critic: critic * (Q - R)^2 of its value Q of every sample, base or edited, with the weighted sum R of its
    rewards. The edit: through * -Q(x0 + edit), whose gradient passes the critic and leaves it as it is, as published,
    here at the edit's mean; and ratio * PPO's clipped loss with bounds low and high, which is ours and reads no
    critic. The two networks have no weights in common.
    """

    low: float = 1e-3
    high: float = 1e-3
    critic: float = 0.5
    through: float = 0.0
    ratio: float = 1.0

    def __post_init__(self) -> None:
        require_range("ActorCritic", self.low, self.high)
        if not self.critic >= 0:
            raise ValueError(f"ActorCritic: critic is {self.critic}, expected 0 or more, the weight of its loss")
        if min(self.through, self.ratio) < 0 or not self.through + self.ratio > 0:
            raise ValueError(f"ActorCritic: through is {self.through} and ratio {self.ratio}, expected 0 or more and "
                             "one of them above 0: nothing else trains the edit")

    @property
    def of_means(self) -> bool:
        """True where the loss reads the edit's mean."""
        return self.through > 0

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Seen) -> Tensor:
        loss = self.critic * (old.value - old.reward).square().to(log_ratio)
        if self.ratio:
            loss = loss + self.ratio * ppo(log_ratio.expm1(), advantage, -self.low, self.high)
        return loss - self.through * old.edited.to(log_ratio) if self.through else loss

    def clipped(self, log_ratio: Tensor, advantage: Tensor, old: Seen | None = None) -> Tensor:
        """Where the clip cuts the edit's gradient, bool [B, N]; nowhere without the clipped loss."""
        return (self.ratio > 0) & cut(log_ratio.expm1(), advantage, -self.low, self.high)


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
    if method.surrogate.ratio and not isinstance(method.advantage, Paired):
        raise ValueError(f"the advantage {type(method.advantage).__name__} gives bases some, which no policy drew: set "
                         "parts.advantage: {type: Paired}, or surrogate: {ratio: 0, through: 1}")
    if not method.surrogate.critic and method.value is None:
        raise ValueError("surrogate.critic is 0 and there is no value part: the critic would learn nothing, set "
                         "parts.value: {type: Recall}")
    if group % 2:
        raise ValueError(f"train.group is {group}: half of the samples are bases, the others their edits: use an even "
                         "number")
    if method.adapted.encoders:
        raise ValueError("adapted.encoders is true, but a method with an edit trains nothing of the pipeline: leave "
                         "texforce out, or set parts: {adapted: {encoders: false, denoisers: true}}")
    if method.backprop or method.preview or method.strides != (1,) or method.tuning.weight or method.lag.most \
            or method.noised(torch.linspace(1, 0, 9), group, 0, 0):
        raise ValueError("a method with an edit trains that alone, on plain rollouts: expected no backprop, preview or "
                         "lag, strides [1], tuning.weight 0, and times Recorded")
