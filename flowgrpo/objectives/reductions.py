"""Weights of decisions: reductions to the loss of an optimizer step, and weights of the steps of an epoch.

A reduction gives weights [B, N] to the decisions of B rows, `reduction(mask)`, and the divisor of their weighted sum,
`reduction.count(mask)`. mask: bool [B, N], true where a decision counts. All reductions agree for rows of one decision,
such as transitions. A step weight is `weight(kernel, grid, steps) -> [K]`, for the K steps that an epoch trains.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flowgrpo.parts import part


@part("reduction")
class TokenMean:
    """Mean over decisions: a long completion has a larger weight (DAPO, 2503.14476, equation 8)."""

    def __call__(self, mask: Tensor) -> Tensor:
        return mask

    def count(self, mask: Tensor) -> int:
        return int(mask.sum())


class OfRows:
    """Mean over all rows of an optimizer step, as released code has it: also those without a decision, which the loss
    leaves out (`text.truncated: mask`). Rows that a selection drops, and those without a reward, are none of the step.
    """

    def count(self, mask: Tensor) -> int:
        return len(mask)


@part("reduction")
class SequenceMean(OfRows):
    """Mean over rows of the mean over a row's decisions (GRPO, 2402.03300, equation 3)."""

    def __call__(self, mask: Tensor) -> Tensor:
        return mask / mask.sum(1, keepdim=True).clamp(min=1)


@part("reduction")
class SequenceSum(OfRows):
    """Mean over rows of the sum over a row's decisions, the log-probability of a whole completion (RLOO, 2402.14740).

    budgeted: divide the sums by the most decisions N that a row can have, one divisor for all (Dr. GRPO, 2503.20783,
    whose released code divides by the most tokens generated).
    """

    budgeted: bool = False

    def __call__(self, mask: Tensor) -> Tensor:
        return mask / mask.shape[1] if self.budgeted else mask


class Divisor(int):
    """Divisor of an optimizer step's loss. tokens: that of what is a mean over trained decisions whatever the loss."""

    tokens: int

    def __new__(cls, count: int, tokens: int) -> "Divisor":
        self = super().__new__(cls, count)
        self.tokens = tokens
        return self


def reduce_loss(loss: Tensor, weights: Tensor, count: int) -> Tensor:
    """Return sum(loss * weights) / count, a scalar, of loss and a reduction's weights [B, N].

    count: the reduction's of the whole optimizer step, over all processes and micro-batches, so that the pieces add up
    to one mean: masks, windows and processes never change the gradient's scale.
    """
    return (loss * weights).sum() / max(count, 1)  # 0 where nothing is trained


@part("step_weight")
class Uniform:
    """Weight 1 for every step: `weight(kernel, grid, steps) -> [K]`, for the K steps that an epoch trains."""

    def __call__(self, kernel: Callable, grid: Tensor, steps: Sequence[int]) -> Tensor:
        return grid.new_ones(len(steps))


@part("step_weight", target="steps")
class InverseDelta:
    """Weight 1 / (grid[i] - grid[i+1]) for step i, [K] (GRPO-Guard, 2510.22319, with its log-ratio).

    As in the released code it is not normalised: on a grid of T uniform steps every weight is T, so the effective
    learning rate grows with the number of steps.
    """

    def __call__(self, kernel: Callable, grid: Tensor, steps: Sequence[int]) -> Tensor:
        return 1 / (grid[:-1] - grid[1:])[list(steps)]


@part("step_weight")
class Sigma:
    """Weight grid[i], the time t of step i, [K] (AWM, 2509.25050, its code)."""

    def __call__(self, kernel: Callable, grid: Tensor, steps: Sequence[int]) -> Tensor:
        return grid[list(steps)]


@part("step_weight", target="steps", reads_deviations=True)
class NoiseLevel:
    """Weight std_i / mean(std), [K], std_i the deviation of step i, with a schedule's factor on its noise: mean 1 over
    the trained steps (TempFlow-GRPO, 2508.04324, whose released constants 1/mean(std) are 2.25 for SD3.5 and 1.73 for
    FLUX)."""

    def __call__(self, kernel: Callable, grid: Tensor, steps: Sequence[int]) -> Tensor:
        x = grid.new_zeros(1, 1)
        std = torch.stack([kernel(x, x, grid, step).std for step in steps])
        return std / std.mean()
