"""Weights of the steps of an epoch: `weight(kernel, grid, steps) -> [K]`, for the K steps that it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flowgrpo.parts import part


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
