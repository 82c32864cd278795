"""Reductions: the loss of an optimizer step as a mean over decisions, rows, or the token budget of a row.

A reduction gives weights [B, N] to the decisions of B rows, `reduction(mask)`, and the divisor of their weighted sum,
`reduction.count(mask)`. mask: bool [B, N], true where a decision counts. All reductions agree for rows of one decision,
such as transitions.
"""

from __future__ import annotations

from torch import Tensor

from flowgrpo.parts import part


@part("reduction")
class TokenMean:
    """Mean over decisions: a long completion has a larger weight (DAPO, 2503.14476, equation 8)."""

    def __call__(self, mask: Tensor) -> Tensor:
        return mask

    def count(self, mask: Tensor) -> int:
        return int(mask.sum())


@part("reduction")
class SequenceMean:
    """Mean over rows of the mean over a row's decisions (GRPO, 2402.03300, equation 3)."""

    def __call__(self, mask: Tensor) -> Tensor:
        return mask / mask.sum(1, keepdim=True).clamp(min=1)

    def count(self, mask: Tensor) -> int:
        return int(mask.any(1).sum())


@part("reduction")
class SequenceSum:
    """Mean over rows of the sum over a row's decisions, the log-probability of a whole completion (RLOO, 2402.14740).

    budgeted: divide the sums by the most decisions N that a row can have, one divisor for all (Dr. GRPO, 2503.20783,
    whose released code divides by the most tokens generated).
    """

    budgeted: bool = False

    def __call__(self, mask: Tensor) -> Tensor:
        return mask / mask.shape[1] if self.budgeted else mask

    def count(self, mask: Tensor) -> int:
        return int(mask.any(1).sum())


def reduced(loss: Tensor, weights: Tensor, count: int) -> Tensor:
    """Return sum(loss * weights) / count, a scalar, of loss and weights [B, N].

    weights: a reduction's, of these rows.
    count: the reduction's count of the whole optimizer step, over all processes and micro-batches.

    The pieces add up to one mean, so masks, windows and processes never change the gradient's scale.
    """
    return (loss * weights).sum() / count
