"""The parts of a policy-gradient loss: log-ratios, surrogate, step weights, regulariser, reduction.

All are pure and per decision, [B, N] for B rows of N decisions; masks and the division come last, in
`mean_over_decisions`. Ratios and clip ranges are in the unit of `gaussian.log_prob`, a mean over the latent's values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo.gaussian import kl
from flowgrpo.types import Gaussian, Scored


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
class Clip:
    """PPO's clipped surrogate as a loss, max(-A r, -A clip(r, 1-low, 1+high)) with r = exp(log_ratio): [B, N].

    The advantage A is [B, N] or [B, 1]. 0 <= low <= 1, high >= 0.
    """

    low: float = 1e-4
    high: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 or not self.high >= 0:
            raise ValueError(f"Clip: low is {self.low} and high {self.high}, expected 0 to 1 and 0 or more")

    def __call__(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        assert advantage.ndim == 2, advantage.shape
        # Clipped as r - 1: next to 1 float32 has steps of 1.2e-7, too coarse for a clip range of 2e-6.
        excess = log_ratio.expm1()
        return -advantage - torch.minimum(advantage * excess, advantage * excess.clamp(-self.low, self.high))

    def clipped(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """Where the clip cuts the gradient, bool [B, N]: a ratio out of range on the side that A pushes it to."""
        excess = log_ratio.expm1()
        return ((advantage > 0) & (excess > self.high)) | ((advantage < 0) & (excess < -self.low))


@dataclass(frozen=True)
class Uniform:
    """Weight 1 for every step: `weight(grid, steps) -> [K]`."""

    def __call__(self, grid: Tensor, steps: Sequence[int]) -> Tensor:
        return grid.new_ones(len(steps))


@dataclass(frozen=True)
class InverseDelta:
    """Weight 1 / (grid[i] - grid[i+1]) for step i, [K] (GRPO-Guard, 2510.22319, with its log-ratio).

    As in the released code it is not normalised: on a grid of T uniform steps every weight is T, so that learning rates
    go with the number of steps.
    """

    def __call__(self, grid: Tensor, steps: Sequence[int]) -> Tensor:
        return 1 / (grid[:-1] - grid[1:])[list(steps)]


@dataclass(frozen=True)
class GaussianKL:
    """weight * KL to the reference policy per decision, [B, N]; its gradient reaches the new mean.

    The KL is `gaussian.kl`, with the deviation of the whole step. Weight 0 reads neither means nor the reference.
    """

    weight: float = 0.0

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise ValueError(f"GaussianKL: weight is {self.weight}, expected 0 or more")

    def __call__(self, new: Scored, reference: Scored | None) -> Tensor:
        if self.weight == 0:
            return torch.zeros_like(new.logp)
        assert reference is not None, "a KL of positive weight needs the reference's score"
        return self.weight * _divergence(new, reference)


def mean_over_decisions(loss: Tensor, mask: Tensor, count: int) -> Tensor:
    """sum(loss * mask) / count, a scalar, of loss and mask [B, N].

    count is the number of trained decisions of the whole optimiser step, over all processes and micro-batches: the
    pieces then add up to one mean, and masks, windows and processes never change the gradient's scale.
    """
    return (loss * mask).sum() / count


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
