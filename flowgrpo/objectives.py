"""The parts of a policy-gradient loss: log-ratios, surrogate, step weights, regulariser.

All are pure and per decision, [B, N] for B rows of N decisions; masks and the division come last, in `reductions`.
Ratios and clip ranges are in the unit of `gaussian.log_prob`, a mean over the latent's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowgrpo.gaussian import kl
from flowgrpo.parts.schedules import Constant
from flowgrpo.types import Context, Gaussian, Scored


@dataclass(frozen=True)
class PlainRatio:
    """The log-ratio logp_new - logp_old, [B, N]."""

    def __call__(self, new: Scored, old: Scored) -> Tensor:
        return new.logp - old.logp


@dataclass(frozen=True)
class Guard:
    """GRPO-Guard's RatioNorm (2510.22319): std * (logp_new - logp_old + b), b = mean((mean_new-mean_old)^2)/(2 std^2).

    b takes away the bias that keeps plain ratios below 1, and std the dependence on the step; what is left is
    mean(z * (mean_new - mean_old)), z the noise that was drawn. b stays in the graph, or its gradient would not cancel.
    Reads mean and std of both. Clip ranges shrink with std: 2e-6 there, where 1e-4 would never clip.
    """

    def __call__(self, new: Scored, old: Scored) -> Tensor:
        return _std(new) * (new.logp - old.logp + _divergence(new, old))


@dataclass(frozen=True)
class SequenceRatio:
    """GSPO's log-ratio (2507.18071, equation 7): for every decision the mean log-ratio of its row's, [B, N].

    A completion's tokens then have one ratio, the likelihood ratio of the whole to the power of 1 / length, and are
    clipped together.
    """

    def __call__(self, new: Scored, old: Scored) -> Tensor:
        mean = ((new.logp - old.logp) * new.mask).sum(1, keepdim=True) / new.mask.sum(1, keepdim=True).clamp(min=1)
        return mean.expand_as(new.logp)


# Surrogates are called as surrogate(log_ratio, advantage, old) -> loss [B, N], of the log-ratio [B, N], an advantage
# [B, N] or [B, 1] and what `beside` gives them of the old policy [B, N]; clipped(...), of the same, is true where they
# cut the gradient. low and high are the ratio's range; only DynamicClip and DivergenceMask read old.


@dataclass(frozen=True)
class Clip:
    """PPO's clipped surrogate as a loss, max(-A r, -A clip(r, 1-low, 1+high)) with r = exp(log_ratio): [B, N].

    The advantage A is [B, N] or [B, 1]. 0 <= low <= 1, high >= 0.
    """

    low: float = 1e-4
    high: float = 1e-4

    def __post_init__(self) -> None:
        _require_range("Clip", self.low, self.high)

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        return _ppo(log_ratio.expm1(), advantage, -self.low, self.high)

    def clipped(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        """Where the clip cuts the gradient, bool [B, N]: a ratio out of range on the side that A pushes it to."""
        return _cut(log_ratio.expm1(), advantage, -self.low, self.high)


@dataclass(frozen=True)
class DualClip:
    """`Clip` whose loss for A < 0 is at most -dual * A, with no gradient beyond: where r passes dual (1912.09729; in
    place of a KL in RIFT, 2505.03344, with ranges of 0.2). One bad sample that became likely cannot rule the update."""

    low: float = 1e-4
    high: float = 1e-4
    dual: float = 3.0

    def __post_init__(self) -> None:
        _require_range("DualClip", self.low, self.high)
        if not self.dual > 1:
            raise ValueError(f"DualClip: dual is {self.dual}, expected above 1, the ratio of an unchanged policy")

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        loss = _ppo(log_ratio.expm1(), advantage, -self.low, self.high)
        return torch.where(advantage < 0, torch.minimum(loss, -self.dual * advantage), loss)

    def clipped(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        excess = log_ratio.expm1()
        return _cut(excess, advantage, -self.low, self.high) | ((advantage < 0) & (excess > self.dual - 1))


@dataclass(frozen=True)
class DynamicClip:
    """`Clip` for tokens, wider where the old policy found the token unlikely (DCPO, 2509.02333).

    With q = exp(old) the range of r is 1/2 + sqrt(max(1 - 4 low / q, 0)) / 2 to 1/2 + sqrt(1 + 4 high / q) / 2, at most
    `cap` (10 in the released code). q must be a probability: of a Gaussian transition it would be a density.
    """

    low: float = 0.16
    high: float = 0.2
    cap: float = 10.0

    def __post_init__(self) -> None:
        _require_range("DynamicClip", self.low, self.high)
        if not self.cap > 1:
            raise ValueError(f"DynamicClip: cap is {self.cap}, expected above 1 (infinity for none)")

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        return _ppo(log_ratio.expm1(), advantage, *self._range(old))

    def clipped(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        return _cut(log_ratio.expm1(), advantage, *self._range(old))

    def _range(self, old: Tensor | None) -> tuple[Tensor, Tensor]:
        """The bounds of r - 1, each [B, N]."""
        assert old is not None, "DynamicClip needs the old log-probability of every decision"
        q = old.exp()
        lowest = ((1 - 4 * self.low / q).clamp(min=0).sqrt() - 1) / 2
        highest = ((1 + 4 * self.high / q).sqrt() - 1) / 2
        return lowest, highest.clamp(max=self.cap - 1)


@dataclass(frozen=True)
class DivergenceMask:
    """-A r, without a gradient where the policy is far from the old one and the update leads further away (Flow-DPPO,
    2606.11025): where the divergence mean((mean_new - mean_old)^2) / (2 std^2) is at least `bound`, and A > 0 with
    r > 1, or A < 0 with r < 1. It is a `Clip` whose range is open, or closed, by the divergence."""

    bound: float = 1e-5
    low = high = math.inf  # no range of the ratio

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ValueError(f"DivergenceMask: bound is {self.bound}, expected above 0")

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        return _ppo(log_ratio.expm1(), advantage, *self._range(old))

    def clipped(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        return _cut(log_ratio.expm1(), advantage, *self._range(old))

    def _range(self, divergence: Tensor | None) -> tuple[Tensor, Tensor]:
        assert divergence is not None, "DivergenceMask needs the divergence of every decision"
        width = torch.where(divergence >= self.bound, 0.0, math.inf)
        return -width, width


def beside(surrogate: Any, new: Scored, old: Scored) -> Tensor:
    """What a surrogate reads beside ratio and advantage, [B, N]: the divergence from the old policy, of a
    DivergenceMask, otherwise the old log-probability."""
    return _divergence(new, old).detach() if isinstance(surrogate, DivergenceMask) else old.logp


@dataclass(frozen=True)
class Reinforce:
    """-A (1 + log_ratio), whose gradient is -A grad log p at every ratio: no importance weight, no clip (DDPO_SF,
    2305.13301). It is the surrogate -A r to first order, and meant for one update per batch."""

    low = high = math.inf  # no range of the ratio

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        assert advantage.ndim == 2, advantage.shape
        return -advantage * (1 + log_ratio)

    def clipped(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        return torch.zeros_like(log_ratio, dtype=torch.bool)


@dataclass(frozen=True)
class Truncated:
    """-A clip(r, 1-low, 1+high) log p, the clipped ratio r a constant: an importance weight with bounds, and a gradient
    for every decision, also where PPO's clip leaves none (CISPO, 2506.13585, equations 4 and 5, which bounds above
    alone: low is 1)."""

    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        _require_range("Truncated", self.low, self.high)

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        assert advantage.ndim == 2 and old is not None, advantage.shape
        weight = 1 + log_ratio.detach().expm1().clamp(-self.low, self.high)
        return -weight * advantage * (old + log_ratio)

    def clipped(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        """Where the weight is bounded, which cuts no gradient, bool [B, N]."""
        excess = log_ratio.expm1()
        return (excess > self.high) | (excess < -self.low)


@dataclass(frozen=True)
class Ascent:
    """-R, the reward itself in place of an advantage, or with a margin max(margin - R, 0), which leaves alone what is
    good enough (ReFL, 2304.05977: a margin of 2). For methods with `backprop`, whose scores are rewards."""

    margin: float | None = None
    low = high = math.inf  # no range of the ratio

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        assert old is not None, "Ascent needs the old reward of every sample"
        reward = old + log_ratio
        return -reward if self.margin is None else (self.margin - reward).clamp(min=0)

    def clipped(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        assert old is not None, "Ascent needs the old reward of every sample"
        return old + log_ratio >= (math.inf if self.margin is None else self.margin)


@dataclass(frozen=True)
class Uniform:
    """Weight 1 for every step: `weight(kernel, grid, steps) -> [K]`, for the K steps that an epoch trains."""

    def __call__(self, kernel: Callable, grid: Tensor, steps: Sequence[int]) -> Tensor:
        return grid.new_ones(len(steps))


@dataclass(frozen=True)
class InverseDelta:
    """Weight 1 / (grid[i] - grid[i+1]) for step i, [K] (GRPO-Guard, 2510.22319, with its log-ratio).

    As in the released code it is not normalised: on a grid of T uniform steps every weight is T, so that learning rates
    go with the number of steps.
    """

    def __call__(self, kernel: Callable, grid: Tensor, steps: Sequence[int]) -> Tensor:
        return 1 / (grid[:-1] - grid[1:])[list(steps)]


@dataclass(frozen=True)
class Sigma:
    """Weight grid[i], the time t of step i, [K] (AWM, 2509.25050, its code)."""

    def __call__(self, kernel: Callable, grid: Tensor, steps: Sequence[int]) -> Tensor:
        return grid[list(steps)]


@dataclass(frozen=True)
class NoiseLevel:
    """Weight std_i / mean(std), [K], std_i the deviation of step i, with a schedule's factor on its noise: mean 1 over
    the trained steps (TempFlow-GRPO, 2508.04324, whose released constants 1/mean(std) are 2.25 for SD3.5 and 1.73 for
    FLUX)."""

    def __call__(self, kernel: Callable, grid: Tensor, steps: Sequence[int]) -> Tensor:
        x = grid.new_zeros(1, 1)
        std = torch.stack([kernel(x, x, grid, step).std for step in steps])
        return std / std.mean()


# Regularisers are called as kl(new, reference) -> loss [B, N]. Their schedule says what becomes of the weight from
# epoch to epoch: `in_epoch`. Where the weight is 0 the reference is not read, and may be None.


@dataclass(frozen=True)
class GaussianKL:
    """weight * KL to the reference policy per decision, [B, N]; its gradient reaches the new mean (Flow-GRPO,
    2505.05470, and DPOK, 2305.16381: the sum over steps of KL(new || reference) on the policy's own samples).

    The KL is `gaussian.kl`, with the deviation of the whole step.
    """

    weight: float = 0.0
    schedule: Any = Constant()

    def __post_init__(self) -> None:
        _require_weight(self)

    def __call__(self, new: Scored, reference: Scored | None) -> Tensor:
        return _weighted(self, new, reference, _divergence)


@dataclass(frozen=True)
class OutputError:
    """weight * mean squared difference of the model's outputs, [B, N]: every step counts the same, whatever its noise
    (DPOK's released code, 2305.16381, which calls it KL: of predicted noises, guidance applied, with weights 0.01 and
    0.1 where advantages count 10 and 1000 times).

    A transition's mean is affine in the output, so that it is the difference of means over their `slope`, squared.
    """

    weight: float = 0.0
    schedule: Any = Constant()

    def __post_init__(self) -> None:
        _require_weight(self)

    def __call__(self, new: Scored, reference: Scored | None) -> Tensor:
        return _weighted(self, new, reference, _output_error)


def k1(new: Tensor, reference: Tensor) -> Tensor:
    """log p - log q of log-probabilities [B, N] of samples of p, the new policy; q is the reference.

    Its mean is KL(p || q), but its gradient, grad log p, has mean 0: a number to watch, not a loss.
    (k1, k2, k3: J. Schulman, Approximating KL Divergence, 2020.)
    """
    return new - reference


def k2(new: Tensor, reference: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased from the third order of the difference on, but its gradient,
    (log p - log q) grad log p, has the mean grad KL(p || q) on samples of p."""
    return (new - reference).square() / 2


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): its mean is KL(p || q) and it is never negative (the term of GRPO, 2402.03300, equation 4).

    Its gradient, (1 - q/p) grad log p, has the mean grad KL(q || p) on samples of p.
    """
    log_ratio = reference - new
    return log_ratio.expm1() - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True)
class SampledKL:
    """weight * an estimate of the KL to the reference policy from the samples' log-probabilities alone, [B, N]
    (`k1`, `k2` or `k3`).

    For tokens, and where no means are kept. A transition's log-probability is a mean over the latent's values: there k1
    estimates the KL per value, while k2 and k3 see the differences of whole pictures shrunk by that mean.
    """

    weight: float = 0.0
    estimator: str = "k3"
    schedule: Any = Constant()

    def __post_init__(self) -> None:
        _require_weight(self)
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"SampledKL: estimator is {self.estimator!r}, expected one of {', '.join(ESTIMATORS)}")

    def __call__(self, new: Scored, reference: Scored | None) -> Tensor:
        estimate = ESTIMATORS[self.estimator]
        return _weighted(self, new, reference, lambda new, reference: estimate(new.logp, reference.logp))


def regularises(kl: Any) -> bool:
    """Whether a KL has a weight above 0 in any epoch, so that a reference is read."""
    return not kl.schedule.silent(kl.weight)


def in_epoch(kl: Any, context: Context) -> Any:
    """The KL at the weight that its schedule gives it in the context's epoch."""
    return replace(kl, weight=kl.schedule(kl.weight, context), schedule=Constant())


def _require_range(part: str, low: float, high: float) -> None:
    if not 0 <= low <= 1 or not high >= 0:
        raise ValueError(f"{part}: low is {low} and high {high}, expected 0 to 1 and 0 or more")


def _ppo(excess: Tensor, advantage: Tensor, lowest: float | Tensor, highest: float | Tensor) -> Tensor:
    """max(-A r, -A clip(r)) of excess = r - 1 within lowest to highest.

    Clipped as r - 1: next to 1 float32 has steps of 1.2e-7, too coarse for a clip range of 2e-6.
    """
    assert advantage.ndim == 2, advantage.shape
    return -advantage - torch.minimum(advantage * excess, advantage * excess.clamp(lowest, highest))


def _cut(excess: Tensor, advantage: Tensor, lowest: float | Tensor, highest: float | Tensor) -> Tensor:
    """Where `_ppo` has no gradient for a non-zero advantage, bool [B, N]."""
    return ((advantage > 0) & (excess > highest)) | ((advantage < 0) & (excess < lowest))


def _require_weight(kl: Any) -> None:
    if not kl.weight >= 0:
        raise ValueError(f"{type(kl).__name__}: weight is {kl.weight}, expected 0 or more")
    kl.schedule.silent(kl.weight)  # refuses a weight that it could not change


def _weighted(kl: Any, new: Scored, reference: Scored | None, distance: Callable[[Scored, Scored], Tensor]) -> Tensor:
    if kl.weight == 0:
        return torch.zeros_like(new.logp)
    assert reference is not None, "a KL of positive weight needs the reference's score"
    return kl.weight * distance(new, reference)


def _output_error(new: Scored, other: Scored) -> Tensor:
    """The mean squared difference of the outputs that two policies' means come from: [B, N]."""
    assert new.slope is not None, "this part of the method needs recorded slopes"
    apart = (new.mean - other.mean).square().flatten(2).mean(dim=2)
    return apart / new.slope.to(apart).square()


def _divergence(new: Scored, other: Scored) -> Tensor:
    """gaussian.kl of every decision, at the new policy's std: [B, N]."""
    assert new.mean is not None and other.mean is not None, "this part of the method needs recorded means"
    std = _std(new).reshape(-1, *[1] * (new.mean.ndim - 2))
    means = new.mean.flatten(0, 1), other.mean.flatten(0, 1)
    return kl(Gaussian(means[0], std), Gaussian(means[1], std)).view(new.logp.shape)


def _std(scored: Scored) -> Tensor:
    """The std of every decision, [B, N], beside logp."""
    assert scored.std is not None, "this part of the method needs recorded deviations"
    return scored.std.to(scored.logp).expand(scored.logp.shape)
