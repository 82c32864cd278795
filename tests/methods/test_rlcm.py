"""RLCM: multistep consistency sampling as the policy, on a latent consistency model and on a flow."""

import math

import pytest
import torch
from diffusers import FlowMatchLCMScheduler

from flowgrpo import gaussian
from flowgrpo.methods import preset
from flowgrpo.methods.validate import resolve
from flowgrpo.samplers import kernels
from flowgrpo.samplers.growth import explore
from flowgrpo.samplers.rollout import seeder
from flowgrpo.tools.check.tiny import make
from tests.helpers import tiny

STEPS, GUIDANCE = 4, 8.0
F64 = torch.float64


def latent_consistency(**options):
    """A policy over the tiny LatentConsistencyModelPipeline, at the guidance scale that it was given."""
    return tiny.stir(tiny.policy(make("LatentConsistencyModelPipeline")[0], guidance=GUIDANCE, call={}, **options))


def flow_consistency(**options):
    """A policy over the tiny SD3 as a consistency model: its scheduler renoises."""
    pipe = tiny.sd3()
    pipe.scheduler = FlowMatchLCMScheduler(shift_terminal=1 / STEPS)
    return tiny.stir(tiny.policy(pipe, **options))


POLICIES = {"vp": latent_consistency, "flow": flow_consistency}


def trainer(process: str, **options):
    policy = POLICIES[process]()
    return tiny.trainer(policy, method="rlcm", train__steps=STEPS, train__guidance=policy.guidance,
                        train__micro_batch=8, train__grid="stock", **options)


# --- the transition ---------------------------------------------------------------------------------------------------
def consistency(x: torch.Tensor, mean: float, spread: float, data: float, noise: float) -> torch.Tensor:
    """The consistency function of data N(mean, spread^2) at x = data x0 + noise eps: the flow of marginals keeps a
    state's place in them."""
    return mean + spread * (x - data * mean) / math.hypot(data * spread, noise)


def marginal(process: str, at: float) -> tuple[float, float]:
    """The coefficients of data and noise."""
    return (1 - at, at) if process == "flow" else (math.sqrt(at), math.sqrt(1 - at))


@pytest.mark.parametrize("process, grid", [("flow", [1.0, 0.75, 0.5, 0.2, 0.0]), ("vp", [0.01, 0.2, 0.5, 0.9, 1.0])])
def test_with_the_exact_function_of_a_gaussian_every_state_has_the_marginal_of_its_noise(process, grid):
    """Moments in closed form: a transition is affine in the state, so that two states tell its slope."""
    mean, spread, kernel = 1.5, 0.3, resolve(tiny.config(method="rlcm"), process).parts()["kernel"]
    grid = torch.tensor(grid, dtype=F64)
    data, noise = marginal(process, float(grid[0]))
    center, variance = data * mean, (data * spread) ** 2 + noise**2
    for i in range(STEPS):
        data, noise = marginal(process, float(grid[i]))
        x = torch.tensor([[center], [center + 1]], dtype=F64)
        x0 = consistency(x, mean, spread, data, noise)
        transition = kernel(x, (x - x0) / grid[i] if process == "flow" else (x - data * x0) / noise, grid, i)
        center, slope = transition.mean[0].item(), (transition.mean[1] - transition.mean[0]).item()
        variance = slope**2 * variance + float(transition.std) ** 2
        data, noise = marginal(process, float(grid[i + 1]))
        assert center == pytest.approx(data * mean, abs=1e-10)
        assert variance == pytest.approx((data * spread) ** 2 + noise**2, abs=1e-10)
    assert float(transition.std) == 0 and (center, variance) == pytest.approx((mean, spread**2), abs=1e-10)


def test_with_the_mean_of_the_data_in_its_place_the_spread_is_lost():
    """What a model that was not distilled predicts of the same Gaussian: the kernel asks for a consistency model."""
    mean, spread, grid = 1.5, 0.3, torch.tensor([1.0, 0.5, 0.0], dtype=F64)
    kernel, variance = preset("rlcm").parts()["kernel"], 1.0
    for i in range(2):
        s = float(grid[i])
        x = torch.tensor([[0.0], [1.0]], dtype=F64)
        gain = (1 - s) * spread**2 / ((1 - s) ** 2 * spread**2 + s**2)
        transition = kernel(x, (x - (mean + gain * (x - (1 - s) * mean))) / s, grid, i)
        variance = (transition.mean[1] - transition.mean[0]).item() ** 2 * variance + float(transition.std) ** 2
    # At s = 1 the mean says nothing of the state: at s = 1/2 there is half of a fresh noise, and little comes through.
    assert variance == pytest.approx((0.09 / 0.545 / 2) ** 2, abs=1e-10) and variance < spread**2 / 10


@pytest.mark.parametrize("process", POLICIES)
def test_the_recorded_density_is_that_of_the_renoised_prediction(process):
    """Against torch's normal around the data that the pipeline's own scheduler predicts; the last step gives it."""
    policy, run = POLICIES[process](), trainer(process)
    assert run.method.rollout.kernel == {"flow": kernels.CPS(1.0), "vp": kernels.VPCPS(1.0)}[process]
    [exploration] = run.rollouts.explorations(0)
    assert exploration.schedule.trained == (0, 1, 2) and exploration.roots == exploration.group
    [part] = explore(policy, policy.encode(["red"]), [exploration], 8, seeder(0, 0))
    rows, stock = policy.encode(["red"] * 4), policy.stock
    for step, taken in enumerate(part.transitions):
        at, after = exploration.grid[step:step + 2].tolist()
        with torch.no_grad():
            output = policy.replay(rows, taken.x, exploration.grid, step, exploration.timesteps)
        if process == "flow":
            x0 = taken.x - at * output
        else:  # the noise that leaves f, the stock scheduler's function
            x0 = (taken.x - math.sqrt(1 - at) * output) / math.sqrt(at)
        data, noise = marginal(process, after)
        density = torch.distributions.Normal(data * x0.double(), noise).log_prob(taken.x_next.double())
        torch.testing.assert_close(taken.old.logp[:, 0].double(), density.mean((1, 2, 3)), rtol=0, atol=2e-5)
    with torch.no_grad():
        at = float(exploration.grid[-2])
        output = policy.replay(rows, taken.x_next, exploration.grid, STEPS - 1, exploration.timesteps)
    data, noise = (1.0, at) if process == "flow" else (math.sqrt(at), math.sqrt(1 - at))
    torch.testing.assert_close(part.finals[0], (taken.x_next - noise * output) / data, rtol=0, atol=1e-4)
    assert stock is not policy.driver.scheduler


def test_the_kernel_is_the_same_gaussian_as_by_hand():
    x, v = torch.tensor([[2.0, -1.0]], dtype=F64), torch.tensor([[0.5, 1.0]], dtype=F64)
    grid = torch.tensor([0.8, 0.3, 0.0], dtype=F64)
    transition = preset("rlcm").parts()["kernel"](x, v, grid, 0)
    expected = 0.7 * (x - 0.8 * v)  # of the data 1.6 and -1.8
    torch.testing.assert_close(transition.mean, expected, rtol=0, atol=1e-10)
    drawn = torch.tensor([[1.0, -1.0]], dtype=F64)
    density = torch.distributions.Normal(expected, torch.tensor(0.3, dtype=F64)).log_prob(drawn).mean(1)
    torch.testing.assert_close(gaussian.log_prob(transition, drawn), density, rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", [0, 1])
def test_on_a_flow_it_draws_what_the_stock_scheduler_draws(seed):
    stock = FlowMatchLCMScheduler(shift_terminal=1 / STEPS)
    stock.set_timesteps(STEPS)
    assert stock.sigmas.tolist() == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    x, v = torch.randn(2, 1, 3, 4, generator=torch.Generator().manual_seed(seed))
    for i in range(STEPS):
        drawn = stock.step(v, stock.timesteps[i], x, torch.Generator().manual_seed(seed), return_dict=False)[0]
        fresh = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        ours = gaussian.sample(preset("rlcm").parts()["kernel"](x, v, stock.sigmas, i), fresh)
        torch.testing.assert_close(ours, drawn, rtol=0, atol=1e-5)
        x = drawn


# --- the method -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("process", POLICIES)
def test_an_epoch_counts_one_evaluation_per_step_and_begins_at_ratio_one(process):
    run = trainer(process, train__prompts=2, train__group=4)
    before, weights = run.policy.evaluations, run.policy.weights.snapshot()
    metrics = run.run_epoch()
    assert run.rollouts.rollout_evaluations == 2 * 4 * STEPS
    assert run.policy.evaluations - before >= 2 * 4 * (2 * STEPS - 1)  # and the last step is not replayed
    assert run.first_ratio.max_log_ratio <= 1e-6 and math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
    assert any(not torch.equal(value, weights[key]) for key, value in run.policy.weights.snapshot().items())
