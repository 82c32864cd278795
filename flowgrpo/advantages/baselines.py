"""Baselines other than the group's mean: `part(rewards [P, G, R], weights [R], context=None) -> advantages [P, G]`.

Each compares the weighted sum of the rewards (`group.weighted_sum`) and clamps to +-clamp. A sample to which no reward
applies is left out of every statistic and has advantage 0. So has a group without variance, unless a part is designed
to learn from it.

`Paired` compares an edit with its base sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowgrpo.advantages.group import (
    RELATIVE_NOISE,
    AdvantageRule,
    centred,
    group_std,
    require_clamp,
    rows_of,
    sample_logp,
    weighted_sum,
    whitened,
    zero_variance,
)
from flowgrpo.types import Context

METRICS = ("logp",)


@dataclass(frozen=True)
class VirtualBest(AdvantageRule):
    """`virtual_best` of the weighted sum, whose largest possible value is `best` (NGRPO, 2509.18851)."""

    best: float = 1.0
    clamp: float = 5.0

    def __post_init__(self) -> None:
        require_clamp(self.clamp)

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        return virtual_best(weighted_sum(rewards, weights), self.best).clamp(-self.clamp, self.clamp)


@dataclass(frozen=True)
class First(AdvantageRule):
    """Weighted sum less that of the group's first sample, a greedy one: ReMax's baseline (2310.10505).

    The advantage is 0 if the first sample, or the sample itself, has no reward.
    """

    clamp: float = math.inf

    def __post_init__(self) -> None:
        require_clamp(self.clamp)

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        total = weighted_sum(rewards, weights)
        return (total - total[:, :1]).nan_to_num(0).clamp(-self.clamp, self.clamp)


@dataclass(frozen=True)
class NoBaseline(AdvantageRule):
    """Weighted sum of the rewards itself, 0 without any: for a value model (`value`), or rewards as labels."""

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        return weighted_sum(rewards, weights).nan_to_num(0)


@dataclass(frozen=True)
class RiskAverse(AdvantageRule):
    """Mixed value-at-risk weights of RiskPO (2510.00911) as an advantage, per group.

    A = `risk_weights` / (2 + omega) / the group's deviation (ddof 1, eps 1e-8), as in the released code, whose omega is
    0.5; alpha and beta are ours. No advantage is above 0: samples above the upper quantile have weight 0, and worse
    samples have more negative weights. The paper draws quantiles over bundles of several prompts, so that binary
    rewards spread. Here a group is the bundle, and a group of nearly all right or nearly all wrong has little signal.
    """

    alpha: float = 0.2
    beta: float = 0.8
    omega: float = 0.5
    clamp: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha < self.beta <= 1 or not self.omega >= 0:
            raise ValueError(f"RiskAverse: alpha is {self.alpha}, beta {self.beta} and omega {self.omega}, expected "
                             "0 < alpha < beta <= 1 and omega 0 or more")
        require_clamp(self.clamp)

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        total = weighted_sum(rewards, weights)
        scale = (2 + self.omega) * (group_std(total) + 1e-8)
        advantages = risk_weights(total, self.alpha, self.beta, self.omega) / scale[:, None]
        return advantages.masked_fill(zero_variance(total)[:, None], 0).clamp(-self.clamp, self.clamp)


@dataclass(frozen=True)
class Conditional(AdvantageRule):
    """`conditional` on a metric of the samples (CANON, 2509.23962): "logp", their old log-probability.

    Needs a context that has it.
    """

    mu: float = 0.5
    metric: str = "logp"
    clamp: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.mu <= 1:
            raise ValueError(f"Conditional: mu is {self.mu}, expected 0 (own half) to 1 (other half)")
        if self.metric not in METRICS:
            raise ValueError(f"Conditional: metric is {self.metric!r}, expected one of {', '.join(METRICS)}")
        require_clamp(self.clamp)

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        total = weighted_sum(rewards, weights)
        return conditional(total, sample_logp(context, total, "Conditional"), self.mu).clamp(-self.clamp, self.clamp)


@dataclass(frozen=True)
class ValueTracker(AdvantageRule):
    """Success rate tracked for every prompt as its baseline, then normalised over the batch (SPO, 2509.13232).

    A = whitened(r - v) with v = successes / evidence, as they were before this batch; then both are multiplied by
    `keep` and the present samples added. Rewards, weighted and summed, lie within 0 to 1: v is the mean of a Beta
    distribution. A prompt starts with `evidence` samples' worth of rate `prior`; SPO's 8 is 1 / (1 - 0.875).

    A reconstruction in one point: SPO forgets by keep = 2^(-KL / KL_half) within 0.875 to 0.96, with the KL between the
    policies of two visits, which is not measured here; `keep` is one number within that range. It is meant for groups
    of one: with several samples per prompt, keep acts once per visit.

    After the first epoch, prompts are drawn by `prompt_weights`: most often those at a rate of 1/2.
    memory["ValueTracker"] holds [evidence, successes] before and after the last epoch that saw a prompt. As in
    `group.running`, every call of an epoch starts from the epochs before, and the first one's rewards count.
    """

    keep: float = 0.9
    prior: float = 0.5
    evidence: float = 8.0
    floor: float = 0.05
    clamp: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.keep <= 1 or not 0 <= self.prior <= 1:
            raise ValueError(f"ValueTracker: keep is {self.keep} and prior {self.prior}, expected 0 to 1")
        if not self.evidence > 0 or not self.floor >= 0:
            raise ValueError(f"ValueTracker: evidence is {self.evidence} and floor {self.floor}, expected evidence "
                             "above 0 and floor 0 or more")
        require_clamp(self.clamp)

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        assert context is not None, "ValueTracker compares with earlier epochs: it needs a context"
        assert len(context.prompts) == len(rewards), (len(context.prompts), rewards.shape)
        total = weighted_sum(rewards, weights)
        _require_rates(total)
        tracked, baselines = context.memory.setdefault("ValueTracker", {}), torch.zeros_like(total[:, :1])
        for prompt, rows in rows_of(context.prompts).items():
            values = total[rows][~total[rows].isnan()]
            baselines[rows] = self._visit(tracked, prompt, context.epoch, values)
        return whitened(total - baselines, ~total.isnan()).clamp(-self.clamp, self.clamp)

    def prompt_weights(self, memory: dict[str, Any], prompts: Sequence[str]) -> Tensor:
        """Return the sampling weight of each prompt, in proportion to sqrt(v (1 - v)) + floor: float64 [len(prompts)].

        A prompt that was never seen has the rate `prior`.
        """
        tracked = memory.get("ValueTracker", {})
        rates = [self._rate(tracked[prompt]["after"]) if prompt in tracked else self.prior for prompt in prompts]
        v = torch.tensor(rates, dtype=torch.float64)
        return (v * (1 - v)).clamp(min=0).sqrt() + self.floor

    def _visit(self, tracked: dict[str, Any], prompt: str, epoch: int, values: Tensor) -> float:
        """Return the prompt's rate before this epoch, then count the epoch's rewards `values`."""
        entry = tracked.get(prompt, {"epoch": None, "after": [self.evidence, self.evidence * self.prior]})
        if entry["epoch"] == epoch:
            return self._rate(entry["before"])
        before = entry["after"]
        if len(values):
            counts = [self.keep * before[0] + len(values), self.keep * before[1] + values.sum().item()]
            tracked[prompt] = {"epoch": epoch, "before": before, "after": counts}
        return self._rate(before)

    @staticmethod
    def _rate(counts: Sequence[float]) -> float:
        return counts[1] / counts[0]


def virtual_best(rewards: Tensor, best: float) -> Tensor:
    """Return rewards [P, G] less the mean, over the deviation (ddof 0), of their group and one more sample of reward
    `best`: [P, G].

    A group that is all wrong is pushed away, by -1/sqrt(G); one that is all best stays at 0 (NGRPO, 2509.18851, its
    advantage calibration; its asymmetric clip is `Clip(low, high)`).
    Raises ValueError for a reward above `best`.
    """
    if (rewards > best + RELATIVE_NOISE * abs(best)).any():
        largest = rewards.nan_to_num(-math.inf).max().item()
        raise ValueError(f"VirtualBest: a reward is {largest:g}, expected at most {best:g}: set best to the largest "
                         "that the weighted sum of rewards can be")
    group = torch.cat([rewards, rewards.new_full((len(rewards), 1), best)], dim=1)
    advantages = (centred(group) / group_std(group, ddof=0)[:, None])[:, :-1]
    return advantages.masked_fill(zero_variance(group)[:, None], 0)


def risk_weights(rewards: Tensor, alpha: float, beta: float, omega: float) -> Tensor:
    """Return the weights of grad log p in the gradient of MVaR, for rewards [P, G] of P distributions: [P, G], all <=
    0.

    MVaR = (1 + omega) * mean of the lowest alpha + mean of the rewards between the quantiles alpha and beta. Its
    weights, with q the quantiles: (1 + omega) min(r - q_alpha, 0) / alpha + (clip(r, q_alpha, q_beta) - q_beta) / (beta
    - alpha) (RiskPO, 2510.00911). 0 where not applicable.
    """
    low, high = (torch.nanquantile(rewards, q, dim=1, keepdim=True) for q in (alpha, beta))
    tail = (rewards - low).clamp(max=0) / alpha
    band = (rewards.clamp(low, high) - high) / (beta - alpha)
    return ((1 + omega) * tail + band).masked_fill(rewards.isnan(), 0)


def conditional(rewards: Tensor, metric: Tensor, mu: float) -> Tensor:
    """Return mu * (r - mean of the other half) + (1 - mu) * (r - mean of the own half), [P, G], halves by `metric` [P,
    G].

    A group is halved at the median of the metric, ties by position; the middle sample of an odd group goes to the lower
    half. Neither half is assumed to be better (CANON, 2509.23962; no division, as in its code). mu 1/2 with halves of
    one size is r less the group's mean. A half without rewards has the group's mean.
    """
    upper = metric.argsort(dim=1, stable=True).argsort(dim=1) >= (metric.shape[1] + 1) // 2
    mean = rewards.nanmean(dim=1, keepdim=True)
    halves = (rewards.masked_fill(~half, torch.nan).nanmean(dim=1, keepdim=True) for half in (upper, ~upper))
    high, low = (torch.where(half.isnan(), mean, half) for half in halves)
    same, other = torch.where(upper, high, low), torch.where(upper, low, high)
    advantages = mu * (rewards - other) + (1 - mu) * (rewards - same)
    return advantages.masked_fill(rewards.isnan() | zero_variance(rewards)[:, None], 0)


def _require_rates(total: Tensor) -> None:
    if (total < -RELATIVE_NOISE).any() or (total > 1 + RELATIVE_NOISE).any():
        known = total[~total.isnan()]
        raise ValueError(f"ValueTracker: rewards from {known.min().item():g} to {known.max().item():g}, expected "
                         "within 0 to 1, as a success rate: scale the weights, or shape the rewards first")


@dataclass(frozen=True)
class Paired(AdvantageRule):
    """Reward of an edit less its base's, for groups of (base, its edit), (base, its edit), ...; the differences are
    standardised over the whole batch.

    They are taken less their mean and over their deviation. A base has advantage 0: its reward is the baseline. So
    differences between bases do not reach the edits. A pair with a missing reward has advantage 0.
    Raises ValueError for a group of an odd number.
    """

    clamp: float = 5.0

    def __post_init__(self) -> None:
        require_clamp(self.clamp)

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        total = weighted_sum(rewards, weights)
        if total.shape[1] % 2:
            raise ValueError(f"Paired: a group of {total.shape[1]}, expected pairs of a base and its edit")
        gains = total[:, 1::2] - total[:, ::2]
        advantages = total.new_zeros(total.shape)
        advantages[:, 1::2] = whitened(gains, ~gains.isnan())
        return advantages.clamp(-self.clamp, self.clamp)
