"""Reward shaping before rewards are compared: `shape(rewards [P, G, R], context=None) -> [P, G, R]`, or [P, G, 1] of a
part that `merges` them.

NaN, a reward that does not apply to a sample, stays NaN.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from flowgrpo.advantages.group import of_samples, weighted_sum, zero_variance
from flowgrpo.errors import UserError
from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.types import Context, InDouble, wide

LABELS, DROPS = 2407_12164, 2509_24203  # separate the draws of labels and of dropped samples from others of an epoch


class Shaping(InDouble):
    """Rewards before they are compared: base class.

    merges: several rewards become one, of weight 1.
    teaches: it is the method's own signal, so that samples of a group that earn the same may differ by it (`shape`).
    reads_reference: it reads a likelihood of every sample under the method's reference, from the context.
    reads_answers: it is about answers that join their group.
    of_lengths: samples of one length compare with it as without it.
    """

    merges = teaches = reads_reference = reads_answers = of_lengths = False

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        """Rewards [P, G, R], [P, G, 1] if it merges them; NaN where none applies."""
        raise NotImplementedError


def shape(rewards: Tensor, weights: Sequence[float], shaping: Shaping | None, context: Context, alone: bool) -> Tensor:
    """Rewards [P, G, R] less the samples' penalty, and shaped: [P, G, R], [P, G, 1] if the shaping merges them.

    Whether a group teaches is decided before both, here alone: where all samples have the same weighted sum of rewards
    (`zero_variance`; DAPO's filter of its released code), neither penalties nor lengths nor lots tell them apart, and
    the group keeps its rewards. Exceptions: a shaping that `teaches`, and a method that compares no samples of a group
    (alone).
    Raises UserError for a shaped reward that overflows.
    """
    totals, less = weighted_sum(rewards, weights)[..., None], penalised(rewards, context)
    silent = zero_variance(totals[..., 0])[:, None, None] & (not alone)
    shaped = less = torch.where(silent, rewards, less)
    if shaping is not None:
        shaped = shaping(less, context)
        if not shaping.teaches:
            shaped = torch.where(silent, totals if shaping.merges else rewards, shaped)
    if shaped.isinf().any():
        known = rewards[~rewards.isnan()]
        raise UserError(f"parts.shaping {type(shaping).__name__}: rewards from {known.min().item():g} to "
                        f"{known.max().item():g} overflow, expected smaller ones: scale them first")
    return shaped


def penalised(rewards: Tensor, context: Context) -> Tensor:
    """Rewards [P, G, R] less the samples' penalty."""
    penalty = context.samples.penalty
    return rewards if penalty is None else rewards - penalty[..., None].to(rewards)


@part("shaping", teaches=True)
class Unlikely(Shaping):
    """Rewards lowered for samples that were likely in their group (Rewarding the Unlikely, 2506.02355).

    They are multiplied by 1 - beta (G - rank) / G, rank 0 the sample of the highest old log-probability [P, G].
    Among equal rewards the rarer sample earns more, and a reward of 0 stays 0. Ties go by position.
    Raises ValueError for a reward below 0, for which the factor would reverse the order.
    """

    beta: Annotated[float, AtLeast(0, to=1)] = 0.25

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        logp = of_samples(context, "logp", rewards, "Unlikely")
        if (rewards < 0).any():
            raise ValueError(f"Unlikely: a reward is {rewards.nan_to_num(0).min().item():g}, expected 0 or more, as a "
                             "success or its share")
        rank = logp.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        size = logp.shape[1]
        return rewards * (1 - self.beta * (size - rank[..., None]).to(rewards) / size)


@part("shaping")
class WinRate(Shaping):
    """Win rate of every reward within the group, at the given margin: `to_win_rates` (Pref-GRPO, 2508.20751).

    Rewards that are win rates already, those of a pairwise judge, are unchanged: the context names them.
    """

    margin: Annotated[float, AtLeast(0)] = 0.0

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        done = torch.zeros(rewards.shape[2], dtype=torch.bool, device=rewards.device)
        if context is not None and context.rewards.win_rates:
            done = torch.as_tensor(context.rewards.win_rates, device=rewards.device)
        return torch.where(done, rewards, to_win_rates(rewards, self.margin))


@part("shaping")
class Binary(Shaping):
    """1 where a reward reaches the threshold, else 0 (the binary reward of DanceGRPO, 2505.07818, whose threshold is
    not published)."""

    threshold: float

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        return (rewards >= self.threshold).to(rewards).masked_fill(rewards.isnan(), torch.nan)


@part("shaping", target="texts", of_lengths=True)
class Overlong(Shaping):
    """Rewards less DAPO's soft overlong punishment (2503.14476, equation 13): 0 up to the last `share` of the tokens
    that a completion may have, then linear growth to 1 at the last one. A group that agrees has none (`shape`)."""

    share: Annotated[float, Above(0, to=1)] = 0.2

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        assert context is not None and context.samples.lengths is not None, "Overlong needs a context with lengths"
        free = (1 - self.share) * context.samples.longest
        punished = ((context.samples.lengths.to(rewards) - free) / (context.samples.longest - free)).clamp(min=0)
        return rewards - punished[..., None]


@part("shaping", merges=True)
class BradleyTerry(Shaping):
    """Labels sampled from rewards, anew each epoch: the first of two samples is above the second with the probability
    sigmoid(scale * (r_1 - r_2)) of Bradley and Terry (RPO, 2407.12164, its code).

    r is the weighted sum of the rewards, which the label replaces: [P, G, 1]. The label is the share of the group's
    other samples that a sample is above, in one order by Plackett and Luce. The draw depends on the epoch alone.
    """

    scale: Annotated[float, Above(0, below=math.inf)] = 1.0

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        context = context or Context()
        totals = weighted_sum(rewards, context.rewards.weights or [1.0] * rewards.shape[2])[..., None]
        draw = np.random.default_rng((LABELS, context.run.epoch))
        noise = torch.from_numpy(draw.gumbel(size=tuple(totals.shape))).to(totals)
        return to_win_rates(self.scale * totals + noise)  # a difference of two Gumbels is logistic


@part("shaping")
class Balanced(Shaping):
    """Bad samples dropped at random down to the number of good ones (the balance of 2509.24203).

    Good is a weighted sum of at least `right`. A dropped sample has no reward any more (NaN). A group without a good
    sample is unchanged. The lot depends on the epoch alone.
    """

    right: float = 0.5

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        context = context or Context()
        totals = weighted_sum(rewards, context.rewards.weights or [1.0] * rewards.shape[2])
        good = totals >= self.right
        bad = ~good & ~totals.isnan()
        draw = np.random.default_rng((DROPS, context.run.epoch)).random(tuple(totals.shape))
        rank = torch.from_numpy(draw).to(totals).masked_fill(~bad, math.inf).argsort(1).argsort(1)
        kept = good.sum(1, keepdim=True)
        return rewards.masked_fill((bad & (rank >= kept) & (kept > 0))[..., None], torch.nan)


@part("shaping", jointly={"high low": "above 0 each"})
class Compressed(Shaping):
    """Rewards compressed above `threshold` and expanded below it, in the same order (TempSamp-R1, 2509.18056).

    Above: threshold + high * log(1 + r - threshold). Below: threshold - (exp(low (threshold - r)) - 1) / (exp(low) -
    1), for rewards within 0 to 1. A perfect sample, such as an answer that joins the group (`decoding.expert`), then
    stands out less. The map, 0.8 and 0.01 are those of a public trainer, which has 1 for `low`.
    """

    threshold: float = 0.8
    high: Annotated[float, Above(0)] = 0.01
    low: Annotated[float, Above(0)] = 5.0

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        over = (rewards - self.threshold).clamp(min=0).log1p() * self.high
        under = ((self.threshold - rewards).clamp(min=0) * self.low).expm1() / math.expm1(self.low)
        return self.threshold + torch.where(rewards < self.threshold, -under, over)


def win_rates(wins: Tensor) -> Tensor:
    """Share of its comparisons that each sample won: wins [..., G, G] to [..., G].

    wins[i, j] is 1 where i beat j, 0 where it lost, 1/2 at a tie, and NaN without a comparison; the diagonal does not
    count. If all are compared the rates sum to G/2. NaN for a sample that was never compared (Pref-GRPO, 2508.20751;
    ties as in its released code).
    """
    assert wins.ndim >= 2 and wins.shape[-1] == wins.shape[-2], wins.shape
    oneself = torch.eye(wins.shape[-1], dtype=torch.bool, device=wins.device)
    return wins.masked_fill(oneself, torch.nan).nanmean(dim=-1)


def to_win_rates(rewards: Tensor, margin: float = 0.0) -> Tensor:
    """Pointwise rewards [P, G, R] as win rates of a pairwise judge of each group: [P, G, R].

    A sample beats another if its reward is larger by more than `margin`, and ties within it, so that no tiny deviation
    amplifies tiny gaps. A sample without the reward, or alone with it, has NaN.
    """
    (rewards,) = wide(rewards)
    by_reward = rewards.transpose(1, 2)
    gap = by_reward[..., :, None] - by_reward[..., None, :]
    wins = (gap > margin).to(rewards) + (gap.abs() <= margin).to(rewards) / 2
    return win_rates(wins.masked_fill(gap.isnan(), torch.nan)).transpose(1, 2)
