"""Advantages of right and wrong samples: `part(rewards [P, G, R], weights [R], context=None) -> advantages [P, G]`.

Each reads the weighted sum of the rewards (`group.weighted_sum`). A sample to which no reward applies is neither right
nor wrong, and has advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from flowgrpo.advantages.group import AdvantageRule, of_samples, weighted_sum, zero_variance
from flowgrpo.parts import Above, part
from flowgrpo.types import Context


@part("advantage")
class Correctness(AdvantageRule):
    """1 - p for a right sample and -p for a wrong one, p the share of right ones in the group, for losses that need
    both (NFT for text, 2505.18116; DisCO, 2505.12366).

    Right is a reward above the group's mean: of rewards 0 and 1 those with 1. A group that agrees has advantage 0.
    """

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        total = weighted_sum(rewards, weights)
        right = (total > total.nanmean(dim=1, keepdim=True)).to(total.dtype).masked_fill(total.isnan(), torch.nan)
        advantage = right - right.nanmean(dim=1, keepdim=True)
        return advantage.nan_to_num(0).masked_fill(zero_variance(total)[:, None], 0)


@part("advantage", single=True)
class Signed(AdvantageRule):
    """`positive` for a right sample and -`negative` for a wrong one, without comparison in the group (2506.01347).

    Right is a weighted sum of at least `threshold`. positive 0.1 and negative 1 are the paper's W-REINFORCE, 0 and 1
    learning from wrong samples alone (NSR), 1 and 0 from right ones alone (PSR), 1 and 1 REINFORCE.
    """

    positive: float = 0.1
    negative: float = 1.0
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if not self.positive >= 0 or not self.negative >= 0 or self.positive == self.negative == 0:
            raise ValueError(f"Signed: positive is {self.positive} and negative {self.negative}, expected 0 or more, "
                             "and one of them above 0")

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        total = weighted_sum(rewards, weights)
        right = (total >= self.threshold).to(total)
        return (right * self.positive - (1 - right) * self.negative).masked_fill(total.isnan(), 0)


@part("advantage")
class Decoupled(AdvantageRule):
    """`Correctness` whose right samples share their weight by an auxiliary reward, compared only among right ones
    (DRPO): (1 - p) n w for a right sample, w = softmax(auxiliary / temperature) over the group's n right ones, and -p
    for a wrong one.

    So a long but right sample is never pushed down, and no wrong one depends on the others' lengths. Right is a first
    reward of at least `right`. The auxiliary is the weighted sum of the other rewards; with one reward it is the length
    of a completion, -length / the longest possible. A group that agrees has advantage 0. An infinite temperature is
    `Correctness`. DRPO's weights, for its discriminative objective: `surrogate: {type: Discriminative}`.
    """

    temperature: Annotated[float, Above(0, words="above 0 (infinity for Correctness)")] = 0.5
    right: float = 0.5

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        first = rewards[..., 0]
        applies, right = ~first.isnan(), first >= self.right
        if rewards.shape[2] > 1:
            auxiliary = weighted_sum(rewards[..., 1:], torch.as_tensor(weights)[1:]).nan_to_num(0)
        else:
            lengths = of_samples(context, "lengths", rewards, "Decoupled")
            auxiliary = -lengths.to(first) / context.samples.longest  # type: ignore[union-attr]
        count = right.sum(1, keepdim=True).to(first)
        share = count / applies.sum(1, keepdim=True).clamp(min=1)
        weight = (auxiliary / self.temperature).masked_fill(~right, -math.inf).softmax(1).nan_to_num(0)
        advantages = torch.where(right, (1 - share) * count * weight, -share)
        return advantages.masked_fill(~applies | (share == 0) | (share == 1), 0)
