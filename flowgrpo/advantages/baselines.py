"""Baselines other than the group's mean: `part(rewards [P, G, R], weights [R], context=None) -> advantages [P, G]`.

Each but `Decoupled` compares the weighted sum of the rewards (`AdvantageRule.compare`). A sample to which no reward
applies is left out of every statistic and has advantage 0. So has a group without variance, unless a part is designed
to learn from it. `Paired` compares an edit with its base sample.

`Correctness`, `Signed` and `Decoupled` know right and wrong samples alone; one without a reward is neither.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from flowgrpo.advantages.group import (
    RELATIVE_NOISE,
    AdvantageRule,
    Clamp,
    below,
    centre,
    group_std,
    of_samples,
    weighted_sum,
    whiten,
    zero_variance,
)
from flowgrpo.parts import Above, AtLeast, OneOf, part
from flowgrpo.types import Context

METRICS = {"logp": "logp", "length": "lengths", "entropy": "entropy"}  # of Conditional: fields of a context


@part("advantage", teaches=True)
class VirtualBest(AdvantageRule):
    """Weighted sum standardised by its group and one more sample of reward `best` (NGRPO, 2509.18851; its asymmetric
    clip is `Clip(low, high)`).

    A group that is all wrong gets -1/sqrt(G), one that is all best 0. The deviation has ddof 0, as in the paper; its
    code has 1, -0.333 for -0.354 of eight samples. Raises ValueError for a weighted sum above `best`.
    """

    best: float = 1.0
    clamp: Clamp = 5.0

    def compare(self, total: Tensor, context: Context | None) -> Tensor:
        if (total > self.best + RELATIVE_NOISE * abs(self.best)).any():
            largest = total.nan_to_num(-math.inf).max().item()
            raise ValueError(f"VirtualBest: a reward is {largest:g}, expected at most {self.best:g}: set best to the "
                             "largest that the weighted sum of rewards can be")
        group = torch.cat([total, total.new_full((len(total), 1), self.best)], dim=1)
        advantages = (centre(group) / group_std(group, ddof=0)[:, None])[:, :-1]
        return advantages.masked_fill(zero_variance(group)[:, None], 0)


@part("advantage")
class First(AdvantageRule):
    """Weighted sum less that of the group's first sample, a greedy one: ReMax's baseline (2310.10505).

    The advantage is 0 if the first sample, or the sample itself, has no reward.
    """

    clamp: Clamp = math.inf

    def compare(self, total: Tensor, context: Context | None) -> Tensor:
        return (total - total[:, :1]).nan_to_num(0)


@part("advantage", target="noise", reads_baseline=True, teaches=True)
class SameNoise(AdvantageRule):
    """Weighted sum less that of the deterministic sample from the same initial noise, the ODE's: ReMax (2310.10505) for
    denoisers, where it stands for the greedy completion.

    scale: "none", as the paper's, or "batch": over the deviation of all differences (ddof 0, eps 1e-4), without another
    mean. A deterministic sample costs a rollout of its own for every initial noise. The advantage is 0 if either has no
    reward.
    """

    scale: Literal["none", "batch"] = "none"
    clamp: Clamp = 5.0

    def compare(self, total: Tensor, context: Context | None) -> Tensor:
        assert context is not None and context.samples.baseline is not None, "its rollout draws the baseline"
        baseline = context.samples.baseline.to(total)[..., None]
        gains = total - below(baseline, baseline.shape[1] // total.shape[1])[..., 0]
        if self.scale == "batch":
            gains = gains / ((gains - gains.nanmean()).square().nanmean().sqrt() + 1e-4)
        return gains.nan_to_num(0)


@part("advantage", single=True, compares=False, teaches=True)
class NoBaseline(AdvantageRule):
    """Weighted sum of the rewards itself, 0 without any: for a value model (`value`), or rewards as labels."""

    def compare(self, total: Tensor, context: Context | None) -> Tensor:
        return total.nan_to_num(0)


@part("advantage", single=True, compares=False)
class Unrewarded(AdvantageRule):
    """0 for every sample: rewards are measured, and the KL alone trains (DiffusionOPD, 2605.15055)."""

    def compare(self, total: Tensor, context: Context | None) -> Tensor:
        return torch.zeros_like(total)


@part("advantage", teaches=lambda rule: rule.upper != 1,
      needs=lambda rule: {"length": ("lengths",), "entropy": ("entropy",)}.get(rule.metric, ()))
class Conditional(AdvantageRule):
    """`conditional` on a metric of the samples (CANON, 2509.23962).

    metric: "logp", the mean old log-probability of a sample's decisions; of texts also "length", the number of tokens,
    and "entropy", the mean entropy of their distributions, by one more replay per epoch. upper: factor on the rewards
    of the upper half where halves are compared, alpha of equation 8; its code has it on the lower one for "entropy".
    """

    mu: Annotated[float, AtLeast(0, to=1, words="0 (own half) to 1 (other half)")] = 0.5
    metric: Annotated[str, OneOf(METRICS)] = "logp"
    upper: Annotated[float, AtLeast(0)] = 1.0
    clamp: Clamp = 5.0

    def compare(self, total: Tensor, context: Context | None) -> Tensor:
        metric = of_samples(context, METRICS[self.metric], total, "Conditional")
        return conditional(total, metric, self.mu, self.upper)


@part("advantage", teaches=True)
class ShiftedMean(AdvantageRule):
    """Reward less its group's mean and a constant `shift` (AsymRE; its code takes -0.1, analysed in 2509.24203).

    Below 0, good samples count more than bad ones, and those of a group that agrees are imitated, by -shift. Above 0
    bad samples count more.
    """

    shift: Annotated[float, Above(-math.inf, below=math.inf)] = -0.1
    clamp: Clamp = 5.0

    def compare(self, total: Tensor, context: Context | None) -> Tensor:
        return (centre(total) - self.shift).masked_fill(total.isnan(), 0)


def conditional(rewards: Tensor, metric: Tensor, mu: float, factor: float = 1.0) -> Tensor:
    """mu * (f - mean f of the other half) + (1 - mu) * (r - mean r of the own half), [P, G].

    f is `factor` * r in the upper half of the `metric` [P, G], and r in the lower one (CANON, 2509.23962, equations 5
    and 8; no division by a deviation, as in its code). A group is halved at the median, ties by position; the middle
    sample of an odd group goes to the upper half. A half without rewards has the group's mean. A group that agrees has
    advantage 0 at factor 1 alone.
    """
    upper = metric.argsort(dim=1, stable=True).argsort(dim=1) >= metric.shape[1] // 2
    compared = torch.where(upper, factor * rewards, rewards)

    def half_means(values: Tensor) -> list[Tensor]:
        """Mean [P, 1] of the upper half, and of the lower; of the group for a half without rewards."""
        mean = values.nanmean(dim=1, keepdim=True)
        halves = (values.masked_fill(~half, torch.nan).nanmean(dim=1, keepdim=True) for half in (upper, ~upper))
        return [torch.where(half.isnan(), mean, half) for half in halves]

    (own_high, own_low), (high, low) = half_means(rewards), half_means(compared)
    across = compared - torch.where(upper, low, high)
    within = rewards - torch.where(upper, own_high, own_low)
    nothing = rewards.isnan() | (zero_variance(rewards)[:, None] if factor == 1 else torch.zeros_like(upper))
    return (mu * across + (1 - mu) * within).masked_fill(nothing, 0)


@part("advantage", target="edits")
class Paired(AdvantageRule):
    """Reward of an edit less its base's: groups are (base, its edit), (base, its edit), ...; the differences are
    standardised over the whole batch.

    A base has advantage 0, so that differences between bases do not reach the edits, and so has a pair with a missing
    reward. Raises ValueError for a group of an odd number.
    """

    clamp: Clamp = 5.0

    def compare(self, total: Tensor, context: Context | None) -> Tensor:
        if total.shape[1] % 2:
            raise ValueError(f"Paired: a group of {total.shape[1]}, expected pairs of a base and its edit")
        gains = total[:, 1::2] - total[:, ::2]
        advantages = total.new_zeros(total.shape)
        advantages[:, 1::2] = whiten(gains, ~gains.isnan())
        return advantages


@part("advantage")
class Correctness(AdvantageRule):
    """1 - p for a right sample and -p for a wrong one, p the share of right ones in the group, for losses that need
    both (NFT for text, 2505.18116; DisCO, 2505.12366).

    Right is a reward above the group's mean by more than rounding. A group that agrees has advantage 0.
    """

    def compare(self, total: Tensor, context: Context | None) -> Tensor:
        noise = RELATIVE_NOISE * total.abs().nan_to_num(0).amax(1, keepdim=True)
        right = (centre(total) > noise).to(total.dtype).masked_fill(total.isnan(), torch.nan)
        advantage = right - right.nanmean(dim=1, keepdim=True)
        return advantage.nan_to_num(0).masked_fill(zero_variance(total)[:, None], 0)


@part("advantage", single=True, teaches=True)
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

    def compare(self, total: Tensor, context: Context | None) -> Tensor:
        right = (total >= self.threshold).to(total)
        return (right * self.positive - (1 - right) * self.negative).masked_fill(total.isnan(), 0)


@part("advantage")
class Decoupled(AdvantageRule):
    """`Correctness` whose right samples share their weight by an auxiliary reward, compared only among right ones
    (DRPO): (1 - p) n w for a right sample, w = softmax(auxiliary / temperature) over the group's n right ones, and -p
    for a wrong one.

    So a long but right sample is never pushed down. Right is a first reward of at least `right`. The auxiliary is the
    weighted sum of the other rewards; with one reward -length / the longest possible one of a completion. A group that
    agrees has advantage 0. DRPO's objective is `surrogate: {type: Discriminative}`.
    """

    temperature: Annotated[float, Above(0, words="above 0 (infinity for Correctness)")] = 0.5
    right: float = 0.5

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        first = rewards[..., 0]
        applies = ~first.isnan()
        right = first >= self.right
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
