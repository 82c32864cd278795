"""Kernels and solvers: published values, limits, orders of convergence, and numbers in every precision."""

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)

from flowgrpo.gaussian import log_prob, sample
from flowgrpo.methods.method import Method
from flowgrpo.samplers.grids import compress_tail, shift_grid
from flowgrpo.samplers.kernels import (
    CPS,
    DDIM,
    ODE,
    AnnealedNoise,
    DanceSDE,
    DPMSolver2M,
    Euler,
    FlowDDIM,
    FlowSDE,
    anneal,
    predict_x0,
    scale_noise,
)
from tests.helpers.refusals import message, refused
from tests.helpers.tables import draw, f64, stock

F64 = torch.float64
FLOW = [FlowSDE, DanceSDE, CPS, FlowDDIM]
SOLVERS = [Euler(), DPMSolver2M()]
KERNELS = [ODE(), *(kernel() for kernel in FLOW), DDIM()]


def grid_of(kernel) -> torch.Tensor:
    return torch.linspace(0.01, 0.99, 11, dtype=F64) if isinstance(kernel, DDIM) else shift_grid(10, 3)


# Values
def posterior(x: float, v: float, s: float, after: float, std: float) -> float:
    return (1 - after) * (x - s * v) + math.sqrt(after**2 - std**2) * (x + (1 - s) * v)


def euler_maruyama(x: float, v: float, s: float, after: float, g: float) -> float:
    return x * (1 - g**2 * (s - after) / (2 * s)) - (s - after) * v * (1 + g**2 * (1 - s) / (2 * s))


CPS_STD = 0.7 * math.sin(0.4 * math.pi)
DDIM_STD = 0.7 * math.sqrt(1 - (0.7 * 0.2 / (0.8 * 0.3)) ** 2)


@pytest.mark.parametrize(("kernel", "grid", "mean", "std", "published"), [
    (ODE(), (0.8, 0.7), 0.95, 0, (0.95, 0)),
    (FlowSDE(0.7), (0.8, 0.7), euler_maruyama(1, 0.5, 0.8, 0.7, 1.4), 1.4 * 0.1**0.5, (0.81525, 0.4427189)),
    (DanceSDE(0.3), (0.8, 0.7), euler_maruyama(1, 0.5, 0.8, 0.7, 0.3), 0.3 * 0.1**0.5, (0.9438125, 0.0948683)),
    (CPS(0.8), (0.8, 0.7), posterior(1, 0.5, 0.8, 0.7, CPS_STD), CPS_STD, (0.4179431, 0.6657396)),
    (FlowDDIM(1.0), (0.8, 0.7), posterior(1, 0.5, 0.8, 0.7, DDIM_STD), DDIM_STD, (0.6291667, 0.5685630)),
    (FlowSDE(0.7), (1.0, 0.96), 0.735, 0.7, (0.735, 0.7))])
def test_published_vectors(kernel, grid, mean, std, published):
    x = torch.ones(1, dtype=F64)
    step = kernel(x, x / 2, f64([*grid]), 0)
    assert step.mean.item() == pytest.approx(mean, abs=1e-12) == pytest.approx(published[0], abs=5e-8)
    assert step.std.item() == pytest.approx(std, abs=1e-12) == pytest.approx(published[1], abs=5e-8)


def test_published_log_prob():
    x, half = torch.ones(1, dtype=F64), torch.full((1,), 0.5, dtype=F64)
    step = FlowSDE(0.7)(x, half, f64([0.8, 0.7]), 0)
    assert log_prob(step, sample(step, half)).item() == pytest.approx(-0.2291182, abs=5e-8)


def test_dance_in_its_own_score_form():
    x, v, level = draw(4), draw(4, seed=1), 0.3
    score = -(x - 0.2 * (x - 0.8 * v)) / 0.64
    step = DanceSDE(level)(x, v, f64([0.8, 0.7]), 0)
    torch.testing.assert_close(step.mean, x - 0.1 * v + level**2 / 2 * score * 0.1, rtol=0, atol=1e-12)


def test_predict_x0_and_noise_rebuild_the_state():
    x0, noise = draw(3, 2), draw(3, 2, seed=1)
    x, v = 0.3 * x0 + 0.7 * noise, noise - x0
    torch.testing.assert_close(predict_x0(x, v, 0.7), x0, rtol=0, atol=1e-14)
    assert predict_x0(x.bfloat16(), v.bfloat16(), torch.tensor(0.7)).dtype == torch.float32


@pytest.mark.parametrize(("level", "grid", "normaliser"), [(0.7, "sd3", 2.252), (0.9, "flux", 1.726)])
def test_tempflow_normalisers(level, grid, normaliser):
    sd3 = FlowMatchEulerDiscreteScheduler(shift=3.0)
    sigmas = stock(sd3, 10) if grid == "sd3" else shift_grid(10, math.exp(1.15))
    x = torch.zeros(1, dtype=F64)
    mean = sum(FlowSDE(level)(x, x, sigmas, i).std.item() for i in range(9)) / 9
    assert 1 / mean == pytest.approx(normaliser, abs=5e-4)


def test_ddim_is_diffusers_ddim():
    scheduler = DDIMScheduler(clip_sample=False, set_alpha_to_one=False)
    scheduler.set_timesteps(10)
    times = [*scheduler.timesteps.tolist(), scheduler.timesteps[-1].item() - 100]
    alphas = torch.stack([scheduler.alphas_cumprod[max(t, 0)] for t in times]).double()
    x, eps, noise = draw(2, 4, 8, 8), draw(2, 4, 8, 8, seed=1), draw(2, 4, 8, 8, seed=2)
    for i in range(10):
        step = DDIM(0.6)(x, eps, alphas, i)
        expected = scheduler.step(eps, scheduler.timesteps[i], x, eta=0.6, variance_noise=noise).prev_sample
        torch.testing.assert_close(sample(step, noise), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("eta", [0.0, 0.4, 1.0])
def test_flow_ddim_is_ddim_in_other_coordinates(eta):
    # y = c x with c = sqrt(a) + sqrt(1-a) turns sqrt(a) x0 + sqrt(1-a) eps into (1-s) x0 + s eps, s = sqrt(1-a)/c.
    alphas = torch.tensor([0.02, 0.3, 0.8, 0.999], dtype=F64)
    scale = alphas.sqrt() + (1 - alphas).sqrt()
    sigmas = (1 - alphas).sqrt() / scale
    x, v = draw(3, 5), draw(3, 5, seed=1)
    for i in range(3):
        flow = FlowDDIM(eta)(x, v, sigmas, i)
        vp = DDIM(eta)(scale[i] * x, x + (1 - sigmas[i]) * v, alphas, i)
        torch.testing.assert_close(scale[i + 1] * flow.mean, vp.mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(scale[i + 1] * flow.std, vp.std, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [CPS(0.8), CPS(1.0), FlowDDIM(1.0), FlowDDIM(0.5)])
def test_posteriors_preserve_the_coefficients_of_data_and_noise(kernel):
    grid = shift_grid(10, 3)
    x0, noise = torch.eye(2, dtype=F64)  # in coordinates of data and noise
    for i in range(10):
        x = (1 - grid[i]) * x0 + grid[i] * noise
        step = kernel(x, noise - x0, grid, i)
        data, kept = step.mean.tolist()
        assert data == pytest.approx(1 - grid[i + 1].item(), abs=1e-12)
        assert kept**2 + step.std.item() ** 2 == pytest.approx(grid[i + 1].item() ** 2, abs=1e-12)
    assert step.std == 0  # of the last step


# Marginals: Gaussian data of variance V, whose exact velocity is linear in x
def final_variance(kernel, variance: float, steps: int, decode_x0: bool = False, start: float = 1.0) -> float:
    """Variance of the final state over `variance`, by propagating it through the linear map of each step."""
    grid, one = start * shift_grid(steps, 3), torch.ones(1, dtype=F64)
    spread = (1 - start) ** 2 * variance + start**2
    for i, sigma in enumerate(grid[:-1].tolist()):
        slope = (sigma - (1 - sigma) * variance) / ((1 - sigma) ** 2 * variance + sigma**2)
        last = decode_x0 and i == steps - 1
        step = (ODE() if last else kernel)(one, slope * one, grid, i)
        spread = step.mean.item() ** 2 * spread + step.std.item() ** 2
    return spread / variance


@pytest.mark.parametrize(("kernel", "decode_x0", "published"), [
    (ODE(), False, ("0.55", "0.080", "0.0009")),
    (FlowSDE(0.7), False, ("0.72", "4.5", "518")), (FlowSDE(0.7), True, ("0.70", "0.13", "0.0015")),
    (DanceSDE(0.3), False, ("0.59", "2.3", "248")), (DanceSDE(0.3), True, ("0.57", "0.09", "0.001")),
    (CPS(0.8), False, ("0.40", "0.077", "0.0009")), (FlowDDIM(1.0), False, ("0.44", "0.078", "0.0009"))])
def test_published_spreads(kernel, decode_x0, published):
    for variance, text in zip((0.25, 0.01, 1e-4), published, strict=True):
        decimals = len(text.partition(".")[2])
        assert f"{final_variance(kernel, variance, 10, decode_x0):.{decimals}f}" == text


@pytest.mark.parametrize("kernel", [ODE(), FlowSDE(0.7), DanceSDE(0.3), FlowDDIM(1.0)])
def test_many_steps_recover_the_data_to_first_order(kernel):
    errors = [abs(final_variance(kernel, 0.25, steps, start=0.95) - 1) for steps in (200, 400, 800)]
    assert errors[-1] < 0.02
    for coarse, fine in pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(1, abs=0.1)


def test_many_steps_of_flow_sde_from_pure_noise_recover_the_data():
    # Of no clean order: the first step adds a finite g^2 D = level^2 however fine the grid, forgotten as T^(-level^2).
    errors = [abs(final_variance(FlowSDE(0.7), 0.25, steps) - 1) for steps in (100, 400, 1600)]
    assert errors[0] < 0.04 and errors[1] < 0.01 and errors[2] < 0.001


def test_cps_never_recovers_the_spread_of_the_data():
    # It preserves coefficients and not marginals: at a given level, finer grids renew the noise more often.
    assert all(final_variance(CPS(0.8), 0.25, steps) < 0.7 for steps in (10, 100, 1600))


# Limits
@pytest.mark.parametrize("kernel", FLOW)
def test_level_zero_is_the_ode_to_the_last_bit(kernel):
    x, v, grid = draw(3, 4), draw(3, 4, seed=1), shift_grid(10, 3)
    for i in range(10):
        step = kernel(0.0)(x, v, grid, i)
        assert torch.equal(step.mean, x - (grid[i] - grid[i + 1]) * v) and step.std == 0
        assert torch.equal(step.mean, ODE()(x, v, grid, i).mean)


@pytest.mark.parametrize("kernel", [*FLOW, DDIM])
def test_kernels_tend_to_their_deterministic_step(kernel):
    x, v, grid = draw(3, 4), draw(3, 4, seed=1), grid_of(kernel())
    for i in range(9):
        still = kernel(0.0)(x, v, grid, i)
        steps = [kernel(level)(x, v, grid, i) for level in (2e-3, 1e-3)]
        gaps = [(step.mean - still.mean).abs().max().item() for step in steps]
        assert steps[0].std / steps[1].std == pytest.approx(2, rel=1e-4)  # the std is of first order in the level,
        assert gaps[0] / gaps[1] == pytest.approx(4, rel=1e-3)  # the mean of second


@pytest.mark.parametrize("kernel, half", [
    (FlowSDE(0.7), FlowSDE(0.35)), (DanceSDE(0.3), DanceSDE(0.15)), (CPS(0.8), CPS(0.4)),
    (FlowDDIM(0.5), FlowDDIM(0.25)), (DDIM(0.5), DDIM(0.25))])
def test_a_scaled_kernel_has_a_multiple_of_its_noise(kernel, half):
    assert scale_noise(kernel, 0.5) == half
    assert scale_noise(kernel, 1) == kernel and type(scale_noise(kernel, 0)) is type(kernel)
    x, v, grid = draw(3, 4), draw(3, 4, seed=1), grid_of(kernel)
    for i in range(9):
        for factor in () if isinstance(kernel, CPS) else (0.25, 1.7):  # CPS's level is an angle
            std = scale_noise(kernel, factor)(x, v, grid, i).std.item()
            assert std == pytest.approx(factor * kernel(x, v, grid, i).std.item(), abs=1e-10)


def test_cps_is_scaled_in_its_angle():
    x, grid = draw(1), f64([0.8, 0.7])
    std = scale_noise(CPS(0.8), 0.5)(x, x, grid, 0).std.item()
    assert std == pytest.approx(0.7 * math.sin(0.2 * math.pi), abs=1e-12)


def test_noise_scaled_out_of_its_range_is_refused():
    for kernel, factor in ((CPS(0.8), 2), (FlowDDIM(0.6), 2), (FlowSDE(0.7), -1)):
        refused(f"{type(kernel).__name__}: (level|eta) is", scale_noise, kernel, factor, error=ValueError)


def test_ddim_without_noise_is_the_deterministic_ddim_step():
    x, eps, alphas = draw(2, 3), draw(2, 3, seed=1), f64([0.36, 0.64])
    step = DDIM(0.0)(x, eps, alphas, 0)
    torch.testing.assert_close(step.mean, 0.8 * (x - 0.8 * eps) / 0.6 + 0.6 * eps, rtol=0, atol=1e-12)
    assert step.std == 0


def test_the_guard_at_sigma_one_is_in_g_alone_and_nowhere_else():
    x, v = draw(4), draw(4, seed=1)
    grid = f64([1, 0.96, 0.9, 0])
    # g(1) = 0.7 sqrt(1 / 0.04) = 3.5; the other sigmas keep the value 1, so the predicted noise is x itself.
    first = FlowSDE(0.7)(x, v, grid, 0)
    torch.testing.assert_close(first.mean, x - 0.04 * v - 3.5**2 * 0.04 / 2 * x, rtol=0, atol=1e-12)
    second = FlowSDE(0.7)(x, v, grid, 1)
    assert second.std.item() == pytest.approx(0.7 * math.sqrt(0.96 / 0.04 * 0.06), abs=1e-12)


@pytest.mark.parametrize("start", [0.999999, 0.9997])
def test_a_start_a_hair_below_one_is_taken_as_one(start):
    x, v = draw(4), draw(4, seed=1)
    near, one = (FlowSDE(0.7)(x, v, f64([first, 0.96, 0.9, 0]), 0) for first in (start, 1))
    assert near.std.item() == pytest.approx(one.std.item(), rel=0.01)
    torch.testing.assert_close(near.mean, one.mean, rtol=0, atol=0.01)
    # Later steps keep their own sigma, however near to 1.
    late = FlowSDE(0.7)(x, v, f64([1, 0.9998, 0.9995, 0.99, 0]), 2)
    assert late.std.item() == pytest.approx(0.7 * math.sqrt(0.9995 / 0.0005 * 0.0095), abs=1e-10)


def test_flow_sde_on_the_stock_grids_of_multistep_schedulers():
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    for scheduler in (UniPCMultistepScheduler(**flow), DPMSolverMultistepScheduler(**flow)):
        grid = stock(scheduler, 10)
        assert 0.999 < grid[0] < 1
        assert all(FlowSDE(0.7)(draw(4), draw(4), grid, i).std < 0.8 for i in range(10))


# Numbers
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_step_is_finite_and_of_half_states_in_float32(kernel, dtype):
    x, v, grid = draw(3, 4).to(dtype), draw(3, 4, seed=1).to(dtype), grid_of(kernel)
    for i in range(10):
        step, same = kernel(x, v, grid, i), kernel(x.float(), v.float(), grid, i)
        assert step.mean.dtype == step.std.dtype == torch.float32
        assert torch.equal(step.mean, same.mean) and torch.equal(step.std, same.std)
        exact = kernel(x.double(), v.double(), grid, i)
        assert exact.mean.dtype == F64 and exact.mean.isfinite().all()
        assert exact.std.isfinite() and exact.std.ndim == 0 and exact.std >= 0
        torch.testing.assert_close(step.mean.double(), exact.mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_kernel_or_solver_reads_a_value_back(kernel):
    # Tensors on the meta device have no values: reading one raises.
    x = torch.empty(2, 3, device="meta")
    step = kernel(x, x, torch.empty(5, device="meta"), 1)
    assert step.mean.shape == (2, 3) and step.std.shape == ()
    assert all(solver(x, x, torch.empty(5, device="meta"), 2, x).shape == (2, 3) for solver in SOLVERS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_gradient_reaches_the_velocity(kernel):
    x, v = draw(2, 3), draw(2, 3, seed=1).requires_grad_()
    kernel(x, v, grid_of(kernel), 4).mean.sum().backward()
    assert (v.grad != 0).all()


def test_a_step_outside_the_grid_and_a_history_at_step_zero_are_refused():
    x = torch.zeros(1, 2)
    for kernel, i in product(KERNELS, (-1, 10)):
        with pytest.raises(AssertionError):
            kernel(x, x, grid_of(kernel), i)
    with pytest.raises(AssertionError):
        DPMSolver2M()(x, x, shift_grid(4, 1), 0, x)


# --- noise that anneals ----------------------------------------------------------------------------------------------
def test_annealed_by_hand():
    """EAD's published schedule: highest 1.2, d = 400."""
    found = [anneal(t, 1.2, 0.1, 400) for t in (0, 50, 100, 200, 10_000)]
    assert found == pytest.approx([1.2, 1.0669, 0.9160, 0.5513, 0.1], abs=1e-4)


@pytest.mark.parametrize("kernel, field", [(FlowSDE(0.5), "level"), (CPS(0.5), "level"), (FlowDDIM(0.5), "eta")])
def test_annealed_noise_is_the_kernel_at_another_level(kernel, field):
    grid, x, v = shift_grid(6, 3.0), *torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    part = AnnealedNoise(kernel, 1.5, 0.4, 3.0)
    for step in range(5):
        factor = max(2.5 - math.exp(step / 3), 0.4)
        found, expected = part(x, v, grid, step), replace(kernel, **{field: 0.5 * factor})(x, v, grid, step)
        torch.testing.assert_close(found.mean, expected.mean)
        torch.testing.assert_close(found.std, expected.std)
    doubled = scale_noise(part, 0.5)
    assert doubled.kernel == replace(kernel, **{field: 0.25}) and doubled.highest == 1.5


def test_annealed_noise_on_another_process_is_that_of_its_form():
    method = Method().having(kernel=AnnealedNoise(FlowDDIM(0.8)))
    assert method.on("vp", ["kernel"]).denoising.kernel == AnnealedNoise(DDIM(0.8))
    assert "is for flow matching" in message(Method().having(kernel=AnnealedNoise()).on, "vp", ["kernel"])


def test_euler_by_hand():
    x = torch.ones(1, dtype=F64)
    assert Euler()(x, x / 2, f64([0.8, 0.7]), 0, None).item() == pytest.approx(0.95, abs=1e-12)
    assert Euler()(x, x / 2, f64([0.8, 0.7]), 0, 9 * x).item() == pytest.approx(0.95, abs=1e-12)


def dpm_2m(x: float, m0: float, m1: float, before: float, now: float, after: float) -> float:
    """The published formula, with its logarithms."""
    rate = [math.log((1 - s) / s) for s in (before, now, after)]
    h, h_previous = rate[2] - rate[1], rate[1] - rate[0]
    d1 = (m0 - m1) / (h_previous / h)
    return after / now * x - (1 - after) * math.expm1(-h) * m0 - 0.5 * (1 - after) * math.expm1(-h) * d1


def test_dpm_2m_published_vector():
    x = torch.ones(1, dtype=F64)
    value = DPMSolver2M()(x, (x - 0.4) / 0.7, f64([0.8, 0.7, 0.55]), 1, 0.3 * x).item()
    assert value == pytest.approx(dpm_2m(1, 0.4, 0.3, 0.8, 0.7, 0.55), abs=1e-12) == pytest.approx(0.8842824, abs=5e-8)


def test_dpm_is_of_first_order_without_a_history_and_around_sigma_one():
    # (s'/s) x + (1 - s'/s) x0, the ODE solved for constant x0, which is also the Euler step.
    x, v, grid = draw(3, 4), draw(3, 4, seed=1), f64([1, 0.9, 0.7, 0])
    value = DPMSolver2M()(x, v, f64([0.8, 0.6]), 0, None)
    torch.testing.assert_close(value, 0.75 * x + 0.25 * (x - 0.8 * v), rtol=0, atol=1e-12)
    torch.testing.assert_close(value, x - 0.2 * v, rtol=0, atol=1e-12)
    torch.testing.assert_close(DPMSolver2M()(x, v, grid, 0, None), x - 0.1 * v, rtol=0, atol=1e-12)
    # The step from 1 is infinitely long in lambda, so the history of the next one weighs nothing.
    value = DPMSolver2M()(x, v, grid, 1, draw(3, 4, seed=2))
    torch.testing.assert_close(value, x - 0.2 * v, rtol=0, atol=1e-12)


def test_dpm_ends_with_the_predicted_data():
    x, v = draw(3, 4), draw(3, 4, seed=1)
    for previous in (None, draw(3, 4, seed=2)):
        assert torch.equal(DPMSolver2M()(x, v, f64([0.5, 0.25, 0]), 1, previous), predict_x0(x, v, 0.25))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_every_step_of_a_solver_is_finite_and_in_float32_or_wider(dtype):
    grid = compress_tail(shift_grid(25, 3), 4, 0.4, 3)
    wide, previous = F64 if dtype == F64 else torch.float32, None
    x, v = draw(3, 4).to(dtype), draw(3, 4, seed=1).to(dtype)
    for i in range(len(grid) - 1):
        for solver in SOLVERS:
            value = solver(x, v, grid, i, previous)
            assert value.isfinite().all() and value.dtype == wide
            assert torch.equal(value, solver(x.to(wide), v.to(wide), grid, i, previous))
        previous = predict_x0(x, v, grid[i])
