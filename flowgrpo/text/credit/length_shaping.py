"""Rewards that depend on the length of a completion: parts of a method's `shaping`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo.advantages.shaping import Shaping
from flowgrpo.types import Context, wide


@dataclass(frozen=True)
class LengthSwitch(Shaping):
    """Right samples earn less the longer they are, in groups with a high share of right ones; other groups are
    unchanged (GRPO-lambda, 2505.18086).

    Right is a sample whose first reward reaches `right`. Groups are ranked by their share of right ones over the whole
    batch. The length term `shortened` applies to the upper `top` of them, rounded up, ties by position, and only at a
    share of at least `least`. top: 0.2, of the published runs as we know them; with top 1, `least` alone decides; with
    0 no group has it. Wrong samples and all other rewards are unchanged.
    """

    top: float = 0.2
    least: float = 0.0
    alpha: float = 0.2
    right: float = 1.0

    reads_target = "tokens"

    def __post_init__(self) -> None:
        if not 0 <= self.top <= 1 or not 0 <= self.least <= 1 or not 0 <= self.alpha <= 1:
            raise ValueError(f"LengthSwitch: top is {self.top}, least {self.least} and alpha {self.alpha}, expected 0 "
                             "to 1 each")

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        assert context is not None and context.samples.lengths is not None, "LengthSwitch needs a context with lengths"
        (rewards,) = wide(rewards)
        right = rewards[..., 0] >= self.right
        on = self.switched(right, ~rewards[..., 0].isnan())
        first = torch.where(on[:, None] & right, shortened(rewards[..., 0], right, context.samples.lengths, self.alpha),
                            rewards[..., 0])
        return torch.cat([first[..., None], rewards[..., 1:]], dim=2)

    def switched(self, right: Tensor, applies: Tensor) -> Tensor:
        """Return the groups with the length term: bool [P].

        right, applies: bool [P, G], the samples that are right, and those that have the reward.
        """
        share = right.sum(1) / applies.sum(1).clamp(min=1)
        count = math.ceil(self.top * len(share) - 1e-9)
        upper = torch.zeros_like(share, dtype=torch.bool)
        upper[share.argsort(descending=True, stable=True)[:count]] = True
        return upper & (share >= self.least)


def shortened(rewards: Tensor, right: Tensor, lengths: Tensor, alpha: float) -> Tensor:
    """Return rewards [P, G] times 1 - alpha sigmoid(z): [P, G].

    z is the length [P, G] less the mean length of the group's right samples (bool [P, G]), over their deviation (ddof
    0, eps 1e-6). This is the penalty of "Training Language Models to Reason Efficiently" (2502.04463); as the length
    term of GRPO-lambda it is a reconstruction.
    """
    long = lengths.to(rewards)
    count = right.sum(1, keepdim=True).clamp(min=1)
    mean = (long * right).sum(1, keepdim=True) / count
    spread = ((long - mean).square() * right).sum(1, keepdim=True).div(count).sqrt()
    return rewards * (1 - alpha * ((long - mean) / (spread + 1e-6)).sigmoid())


@dataclass(frozen=True)
class ExitDecay(Shaping):
    """Exponential decay of a group's right samples: the first keeps its reward, and each further one has half of the
    one before (S-GRPO, 2505.07686, whose group is one thought left at ever later places: `EarlyExits`).

    Right is a sample whose first reward reaches `right`; of that reward the N-th right one keeps 1 / 2^(N - 1). Wrong
    samples and all other rewards are unchanged.
    """

    right: float = 1.0

    reads_target = "tokens"

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        (rewards,) = wide(rewards)
        right = rewards[..., 0] >= self.right
        before = (right.long().cumsum(1) - right.long()).to(rewards)
        first = torch.where(right, rewards[..., 0] * 0.5 ** before, rewards[..., 0])
        return torch.cat([first[..., None], rewards[..., 1:]], dim=2)
