"""Regression of a policy on the values of the uniformly random policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo.objectives.sequence_losses import GroupLoss
from flowgrpo.ranges import above
from flowgrpo.types import CompletionBatch, required


@dataclass(frozen=True)
class RandomPolicyValue(GroupLoss):
    """(Q - r - Q')^2 of every token, [B, L] (ROVER, 2509.24981).

    Q = scale * log(p / p_old) of the token, a value of the uniformly random policy. Q' = scale * the mean over all
    tokens of log(p / p_old) in the next state, held constant; 0 behind the last token. r is the advantage, the reward
    less its group's mean, which every token has. Policies that follow softmax(Q) keep all ways to a reward.
    """

    scale: float = 1.0
    reads_uniform = True

    def __post_init__(self) -> None:
        above(self, 0, "scale")

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch) -> Tensor:
        mask = old.new.mask
        value = self.scale * (required(old.new.entropy) - required(old.old.entropy).to(log_ratio)).detach() * mask
        ahead = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)
        return (self.scale * log_ratio - advantage - ahead).square()
