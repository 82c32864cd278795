"""What the mean of an optimiser step's losses is taken over: decisions, rows, or the budget of a row.

A reduction gives weights [B, N] to the decisions of B rows, `reduction(mask)`, and counts what their weighted sum is
divided by, `reduction.count(mask)`. mask: bool [B, N], true where a decision counts. Where a row has one decision, as a
transition has, all are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PerDecision:
    """The mean over decisions: a long completion counts for more (DAPO, 2503.14476, equation 8)."""

    def __call__(self, mask: Tensor) -> Tensor:
        return mask

    def count(self, mask: Tensor) -> int:
        return int(mask.sum())


@dataclass(frozen=True)
class PerRow:
    """The mean over rows of the mean over a row's decisions (GRPO, 2402.03300, equation 3)."""

    def __call__(self, mask: Tensor) -> Tensor:
        return mask / mask.sum(1, keepdim=True).clamp(min=1)

    def count(self, mask: Tensor) -> int:
        return int(mask.any(1).sum())


@dataclass(frozen=True)
class RowSums:
    """The mean over rows of the sum over a row's decisions, the log-probability of a whole completion (RLOO,
    2402.14740); or of the sum over the most decisions N that a row can have, the same divisor for all (`budgeted`; Dr.
    GRPO, 2503.20783, whose released code divides by the most tokens generated)."""

    budgeted: bool = False

    def __call__(self, mask: Tensor) -> Tensor:
        return mask / mask.shape[1] if self.budgeted else mask

    def count(self, mask: Tensor) -> int:
        return int(mask.any(1).sum())


def reduced(loss: Tensor, weights: Tensor, count: int) -> Tensor:
    """sum(loss * weights) / count, a scalar, of loss and weights [B, N].

    weights: a reduction's, of these rows; count: its count of the whole optimiser step, over all processes and
    micro-batches: the pieces then add up to one mean, and masks, windows and processes never change the gradient's
    scale.
    """
    return (loss * weights).sum() / count
