from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from flowgrpo.samplers.grids import compress_tail, shifted
from flowgrpo.samplers.kernels import DPMSolver2M, Euler, predict_x0

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def scalars(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def test_euler_by_hand():
    x = torch.ones(1, dtype=F64)
    assert Euler()(x, x / 2, scalars(0.8, 0.7), 0, None).item() == pytest.approx(0.95, abs=1e-12)
    assert Euler()(x, x / 2, scalars(0.8, 0.7), 0, 9 * x).item() == pytest.approx(0.95, abs=1e-12)


def dpm_2m(x: float, m0: float, m1: float, before: float, now: float, after: float) -> float:
    """The published formula, with its logarithms."""
    rate = [math.log((1 - s) / s) for s in (before, now, after)]
    h, h_previous = rate[2] - rate[1], rate[1] - rate[0]
    d1 = (m0 - m1) / (h_previous / h)
    return after / now * x - (1 - after) * math.expm1(-h) * m0 - 0.5 * (1 - after) * math.expm1(-h) * d1


def test_dpm_2m_published_vector():
    x = torch.ones(1, dtype=F64)
    value = DPMSolver2M()(x, (x - 0.4) / 0.7, scalars(0.8, 0.7, 0.55), 1, 0.3 * x).item()
    assert value == pytest.approx(dpm_2m(1, 0.4, 0.3, 0.8, 0.7, 0.55), abs=1e-12) == pytest.approx(0.8842824, abs=5e-8)


def test_dpm_first_order_by_hand():
    # Without a history: (s'/s) x + (1 - s'/s) x0, the ODE solved for constant x0, which is also the Euler step.
    x, v = draw(3, 4), draw(3, 4, seed=1)
    value = DPMSolver2M()(x, v, scalars(0.8, 0.6), 0, None)
    torch.testing.assert_close(value, 0.75 * x + 0.25 * (x - 0.8 * v), rtol=0, atol=1e-12)
    torch.testing.assert_close(value, x - 0.2 * v, rtol=0, atol=1e-12)


def test_dpm_ends_with_the_predicted_data():
    x, v = draw(3, 4), draw(3, 4, seed=1)
    for previous in (None, draw(3, 4, seed=2)):
        assert torch.equal(DPMSolver2M()(x, v, scalars(0.5, 0.25, 0), 1, previous), predict_x0(x, v, 0.25))


def test_dpm_is_of_first_order_around_sigma_one():
    x, v, grid = draw(3, 4), draw(3, 4, seed=1), scalars(1, 0.9, 0.7, 0)
    torch.testing.assert_close(DPMSolver2M()(x, v, grid, 0, None), x - 0.1 * v, rtol=0, atol=1e-12)
    # The step from 1 is infinitely long in lambda, so the history of the next one weighs nothing.
    value = DPMSolver2M()(x, v, grid, 1, draw(3, 4, seed=2))
    torch.testing.assert_close(value, x - 0.2 * v, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_every_step_is_finite_in_float32_or_wider(dtype):
    x, v, previous = draw(3, 4).to(dtype), draw(3, 4, seed=1).to(dtype), None
    grid = compress_tail(shifted(25, 3), 4, 0.4, 3)
    for i in range(len(grid) - 1):
        value = DPMSolver2M()(x, v, grid, i, previous)
        assert value.isfinite().all() and value.dtype == (F64 if dtype == F64 else torch.float32)
        previous = predict_x0(x, v, grid[i])


def test_half_states_are_stepped_in_float32():
    x, v, previous = draw(3, 4).bfloat16(), draw(3, 4, seed=1).bfloat16(), draw(3, 4, seed=2).float()
    grid = shifted(10, 3)
    for solver in (Euler(), DPMSolver2M()):
        assert torch.equal(solver(x, v, grid, 4, previous), solver(x.float(), v.float(), grid, 4, previous))


def solve(solver, steps: int) -> float:
    """Integrate Gaussian data of variance 1/4 with its exact velocity from sigma 0.9 to 0.1, starting at x = 1."""
    grid, x, previous = torch.linspace(0.9, 0.1, steps + 1, dtype=F64), torch.ones(1, dtype=F64), None
    for i, sigma in enumerate(grid[:-1].tolist()):
        v = (sigma - (1 - sigma) / 4) / ((1 - sigma) ** 2 / 4 + sigma**2) * x
        x, previous = solver(x, v, grid, i, previous), predict_x0(x, v, sigma)
    return x.item()


@pytest.mark.parametrize(("solver", "order"), [(Euler(), 1), (DPMSolver2M(), 2)])
def test_order_of_convergence(solver, order):
    # The exact flow scales x with the marginal's deviation.
    exact = math.sqrt((0.9**2 / 4 + 0.1**2) / (0.1**2 / 4 + 0.9**2))
    errors = [abs(solve(solver, steps) - exact) for steps in (80, 160, 320)]
    for coarse, fine in pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.1)


def test_no_solver_reads_a_value_back():
    x, grid = torch.empty(2, 3, device="meta"), torch.empty(5, device="meta")
    for solver in (Euler(), DPMSolver2M()):
        assert solver(x, x, grid, 2, x).shape == (2, 3)


def test_a_history_at_step_zero_is_refused():
    x = torch.zeros(1, 2)
    with pytest.raises(AssertionError):
        DPMSolver2M()(x, x, shifted(4, 1), 0, x)
