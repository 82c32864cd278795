"""Deterministic solvers for the steps that draw no noise: `solver(x, v, grid, i, previous) -> x_next`.

x, v: [B, *D] at sigma grid[i]; previous: the x0 predicted at step i-1 (`kernels.predict_x0`), or None: unknown, or of a
solver with `multistep` False. All tensors are float32 or wider.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowgrpo.parts import part
from flowgrpo.samplers.kernels import euler, predict_x0
from flowgrpo.types import wide


@part("solver", multistep=False)
class Euler:
    """First-order step x - D*v, [B, *D]; `previous` is not read."""

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int, previous: Tensor | None) -> Tensor:
        return euler(x, v, grid, i)


@part("solver", multistep=True)
class DPMSolver2M:
    """DPM-Solver++ (2M) (2211.01095, algorithm 2), for the steps after the window in MixGRPO-Flash (2507.21802).

    With lambda = log((1-s)/s), h = lambda' - lambda, and m0, m1 the x0 predicted now and one step earlier:
        x' = (s'/s) x - (1-s') (e^-h - 1) (m0 + D1/2),  D1 = (m0 - m1) h / h_previous.
    D1 is 0, the first-order step, in three cases: no `previous`; the previous step started at s = 1 (infinite
    h_previous); this step ends at 0 (it gives m0).
    """

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int, previous: Tensor | None) -> Tensor:
        x, v = wide(x, v)
        sigma, after = grid[i : i + 2].to(x.dtype)
        m0 = predict_x0(x, v, sigma)
        slope = 0 if previous is None else (m0 - previous) * _step_ratio(grid.to(x.dtype), i)
        # e^-h in closed form: its logarithms are infinite at both ends of the grid.
        decay = (1 - sigma) * after / (sigma * (1 - after))
        return (after / sigma) * x - (1 - after) * (decay - 1) * (m0 + slope / 2)


def _step_ratio(grid: Tensor, i: int) -> Tensor:
    """Return h / h_previous at step i, 0-d; 0 on the step that ends at sigma 0, where h is infinite."""
    assert i > 0, "step 0 has no previous prediction"
    before, now, after = ((1 - grid[i - 1 : i + 2]) / grid[i - 1 : i + 2]).log()
    return torch.where(grid[i + 1] == 0, 0, (after - now) / (now - before))
