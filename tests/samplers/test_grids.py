"""Grids: shifts, tails and granularities by hand, and the stock grid of a pipeline, whatever its scheduler is told."""

import itertools
import math
import re

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
)

from flowgrpo.samplers.grids import TailPoints, compress_tail, shift_grid, thin_grid
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.tools.check.tiny import make
from flowgrpo.training import memory
from tests.helpers import tiny
from tests.helpers.refusals import message
from tests.helpers.tables import stock

F64 = torch.float64


def close(actual: torch.Tensor, expected: list[float], atol: float) -> None:
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=F64), rtol=0, atol=atol)


def test_shifted_by_hand():
    close(shift_grid(10, 3), [1, 27 / 28, 12 / 13, 7 / 8, 9 / 11, 3 / 4, 2 / 3, 9 / 16, 3 / 7, 1 / 4, 0], 1e-15)
    close(shift_grid(4, 1), [1, 0.75, 0.5, 0.25, 0], 0)


@pytest.mark.parametrize("shift", [0.1, 0.3, 1, 3, 3.158, math.exp(1.15), 7, 12.5])
def test_shifted_starts_at_exactly_one_and_ends_at_exactly_zero(shift):
    grid = shift_grid(25, shift)
    assert grid[0] == 1 and grid[-1] == 0 and (grid.diff() < 0).all()


def test_stock_of_sd3_shifts_twice():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    grid = stock(scheduler, 10)
    close(grid, [1, 0.960, 0.913, 0.858, 0.790, 0.707, 0.602, 0.465, 0.278, 0.009, 0], 5e-4)
    assert torch.equal(grid, scheduler.sigmas) and grid is not scheduler.sigmas


def test_stock_of_flux_with_its_pipelines_sigmas_is_one_shift_by_exp_mu():
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    grid = stock(scheduler, 10, mu=1.15, sigmas=[1 - i / 10 for i in range(10)])
    torch.testing.assert_close(grid.double(), shift_grid(10, math.exp(1.15)), rtol=0, atol=1e-6)
    # The scheduler alone spaces its times down to 1/1000 and not to 1/10.
    assert stock(scheduler, 10, mu=1.15)[-2] < 0.01 < grid[-2]


def test_stock_refuses_schedulers_that_are_no_first_order_flow():
    assert "DDIMScheduler has no sigmas" in message(stock, DDIMScheduler(), 10, error=ValueError)
    told = message(stock, DPMSolverMultistepScheduler(), 10, error=ValueError)
    assert "DPMSolverMultistepScheduler sets 11 sigmas from 157.4 to 0 for 10 steps" in told
    told = message(stock, FlowMatchHeunDiscreteScheduler(), 10, error=ValueError)
    assert "FlowMatchHeunDiscreteScheduler sets 20 sigmas" in told


def test_stock_of_inverted_sigmas_runs_from_noise_to_data_too():
    grid = stock(FlowMatchEulerDiscreteScheduler(invert_sigmas=True, shift=3.0), 10)
    torch.testing.assert_close(grid, stock(FlowMatchEulerDiscreteScheduler(shift=3.0), 10), rtol=0, atol=1e-6)


def test_compress_tail_by_hand():
    # From 3/4 (t = 1/2 at shift 3) five intervals become int(5 * 0.4) = 2: t = 1/2, 1/4, 0.
    grid = shift_grid(10, 3)
    close(compress_tail(grid, after=5, ratio=0.4, shift=3), [*grid[:6].tolist(), 1 / 2, 0], 1e-15)
    # int(5 * 0.2) = 1 and max(int(5 * 0.1), 1) = 1: one interval down to 0, where the released code never gets.
    for ratio in (0.2, 0.1):
        close(compress_tail(grid, after=5, ratio=ratio, shift=3), [*grid[:6].tolist(), 0], 1e-15)


@pytest.mark.parametrize("after, share, left", [
    (4, 0.4, 7),  # T = 25 and noise on the steps 0 to 3: int(22 * 0.4) = 8 points, where `tail: 0.4` has 8 steps
    (4, 0.2, 3), (21, 0.4, 1), (24, 0.4, 1), (4, 1.0, 21)])
def test_the_released_tail_counts_points_from_the_last_step_that_draws_noise(after, share, left):
    grid = shift_grid(25, 3)
    short = compress_tail(grid, after, TailPoints(share), shift=3)
    start = grid[after].item() / (3 - 2 * grid[after].item())  # unshifted
    times = [start * (1 - k / left) for k in range(left + 1)]
    close(short, [*grid[:after].tolist(), *(3 * t / (1 + 2 * t) for t in times)], 1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_compress_tail_keeps_the_head_and_ends_at_zero(dtype):
    grid = shift_grid(25, 3).to(dtype)
    for after, ratio in itertools.product(range(25), (0.01, 0.2, 0.4, 1.0)):
        short = compress_tail(grid, after, ratio, shift=3)
        assert short.dtype == dtype and torch.equal(short[: after + 1], grid[: after + 1]), (after, ratio)
        assert len(short) - 1 - after == max(int((25 - after) * ratio), 1), (after, ratio)
        assert short[-1] == 0 and (short.diff() < 0).all(), (after, ratio)
        assert ratio < 1 or (short - grid).abs().max() <= 8 * torch.finfo(dtype).eps, after  # nothing is changed


def test_a_tail_of_a_pipelines_own_grid_has_its_points():
    # FLUX at 512 x 512, ten steps: ratio 1 changes nothing; two of six steps go by the third sigma behind the noise.
    mu = 0.5 + (1024 - 256) * (1.15 - 0.5) / (4096 - 256)
    own = shift_grid(10, math.exp(mu)).float()
    close(own[5:], [0.652, 0.556, 0.446, 0.319, 0.173, 0], 1e-3)
    assert torch.equal(compress_tail(own, 4, 1.0, None), own)
    assert torch.equal(compress_tail(own, 4, 0.4, None), own[[0, 1, 2, 3, 4, 7, 10]])
    assert torch.equal(compress_tail(own, 4, TailPoints(0.4), None), own[[0, 1, 2, 3, 4, 10]])
    for after, ratio in itertools.product(range(10), (0.1, 0.35, 0.5, 0.77, 1.0)):
        short = compress_tail(own, after, ratio, None)
        assert (short.diff() < 0).all() and short[-1] == 0 and torch.isin(short, own).all()
        assert len(short) == len(compress_tail(own, after, ratio, 3.0))


@pytest.mark.parametrize("tail, left", [(1.0, [0, 1, 2, 3, 4, 5, 6]), (0.5, [0, 1, 2, 4, 6])])
def test_a_run_on_the_stock_grid_keeps_its_shift_in_the_tail(tail, left):
    own = tiny.trainer(tiny.policy(tiny.flux()), method="mix_grpo_flash", train__grid="stock", train__steps=6,
                       parts={"tail": tail, "plan": {"size": 2}})
    [found] = own.rollouts.explorations(0)
    assert torch.equal(found.grid, own.rollouts.grid[left])


GRID = shift_grid(10, 3)
THINNED = "after is {} and stride {}, expected 0 to 9 and 1 or more"


@pytest.mark.parametrize("make, told", [
    (lambda: shift_grid(0, 3), "steps is 0, expected 1 or more"),
    *((lambda shift=shift: shift_grid(10, shift), f"shift is {shift}, expected above 0")
      for shift in (0, -1, math.nan)),
    *((lambda given=given: compress_tail(GRID, *given), told) for given, told in (
        ((10, 0.4, 3), "after is 10, expected 0 to 9"), ((-1, 0.4, 3), "after is -1, expected 0 to 9"),
        ((3, 0, 3), "ratio is 0, expected above 0"), ((3, 1.1, 3), "ratio is 1.1, expected above 0 and at most 1"),
        ((3, 0.4, 0), "shift is 0, expected above 0"))),
    *((lambda given=given: thin_grid(GRID, *given), THINNED.format(*given)) for given in (
        (10, 2), (-1, 2), (3, 0), (3, -2)))])
def test_impossible_settings_are_refused(make, told):
    assert re.search(told, message(make, error=ValueError))


@pytest.mark.parametrize(("steps", "after", "stride", "kept"), [
    (6, 3, 1, range(7)), (6, 3, 2, (0, 1, 2, 3, 4, 6)),
    (6, 2, 2, (0, 1, 2, 3, 5, 6)),  # 3, 5 and then past the end: the released code stops at 5
    (6, 2, 3, (0, 1, 2, 3, 6)), (6, 0, 2, (0, 1, 3, 5, 6)), (6, 5, 2, range(7)), (6, 1, 99, (0, 1, 2, 6)),
    # G2RPO on 16 steps, at step k = 3: sigma[:k+2] and sigma[k+2::2].
    (16, 4, 2, (0, 1, 2, 3, 4, 5, 7, 9, 11, 13, 15, 16))])
def test_thinned_by_hand(steps, after, stride, kept):
    grid = shift_grid(steps, 3)
    assert torch.equal(thin_grid(grid, after, stride), grid[list(kept)])


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("stride", range(1, 8))
def test_thinned_keeps_the_head_and_ends_at_zero_once(dtype, stride):
    grid = shift_grid(25, 3).to(dtype)
    for after in range(25):
        short = thin_grid(grid, after, stride)
        assert short.dtype == dtype and torch.equal(short[: after + 2], grid[: after + 2])
        assert short[-1] == 0 and (short.diff() < 0).all() and set(short.tolist()) <= set(grid.tolist())
        assert len(short) - 2 - after == math.ceil((25 - after - 1) / stride)


STEPS = 5


def sampled(name: str, steps: int = STEPS, **call) -> torch.Tensor:
    """The sigmas that a stock pipeline's scheduler has after a call that nothing of ours takes part in."""
    pipe, own = make(name)
    pipe(prompt="red", num_inference_steps=steps, output_type="latent", **own | call)
    return pipe.scheduler.sigmas


def asked(name: str, steps: int = STEPS, **call) -> torch.Tensor:
    pipe, own = make(name)
    policy = tiny.policy(pipe, call=own | call)
    conditioning, before = policy.encode(["blue", "red"]), policy.evaluations
    grid = policy.stock_grid(conditioning, steps)
    assert policy.evaluations == before and pipe.scheduler is policy.stock
    return grid


@pytest.mark.parametrize("name, call", [
    ("StableDiffusion3Pipeline", {}), ("FluxPipeline", {"height": 16, "width": 16}),
    ("FluxPipeline", {"height": 64, "width": 96}), ("FluxKontextPipeline", {}), ("Flux2Pipeline", {}),
    ("QwenImagePipeline", {}), ("QwenImageEditPipeline", {}), ("ZImagePipeline", {}), ("HunyuanVideoPipeline", {}),
    ("LTX2Pipeline", {})])
def test_it_is_the_grid_of_the_stock_pipelines_own_call(name, call):
    torch.testing.assert_close(asked(name, **call), sampled(name, **call), rtol=0, atol=1e-7)


def test_fluxs_shift_grows_with_the_image_as_published():
    """sigma = e^mu / (e^mu + 1/t - 1), mu linear in the tokens: 0.5 at 256, 1.15 at 4096."""
    times = torch.linspace(1, 1 / STEPS, STEPS, dtype=torch.float64)
    for side, tokens in ((16, 16), (32, 64)):  # 2 pixels to a latent, 2 latents to a token
        shift = math.exp(0.5 + 0.65 * (tokens - 256) / (4096 - 256))
        expected = [*(shift / (shift + 1 / times - 1)).tolist(), 0.0]
        assert asked("FluxPipeline", height=side, width=side).tolist() == pytest.approx(expected, abs=1e-6)


def test_a_schedule_of_betas_is_the_pipelines_own_too():
    pipe = tiny.sd3()
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_beta_sigmas=True)
    policy = tiny.policy(pipe)
    grid = policy.stock_grid(policy.encode(["red"]), STEPS)
    plain = asked("StableDiffusion3Pipeline")
    alone = FlowMatchEulerDiscreteScheduler(shift=3.0, use_beta_sigmas=True)
    alone.set_timesteps(STEPS)
    assert torch.equal(grid, alone.sigmas) and (grid - plain).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["exponential", "linear"])
@pytest.mark.parametrize("name", ["FluxPipeline", "QwenImagePipeline", "ZImagePipeline", "CogView4Pipeline",
                                  "Lumina2Pipeline", "OvisImagePipeline"])
def test_a_deterministic_rollout_on_it_gives_the_stock_pipelines_latents(name, kind):
    """CogView4's network is told times that its scheduler has not shifted."""
    pipe, call = make(name)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type=kind)
    policy = tiny.policy(pipe, call=call, guidance=3.0)
    conditioning = policy.encode(["red", "a cat"])
    task = Segment(policy.stock_grid(conditioning, STEPS), range(STEPS))
    with torch.no_grad():
        found, _ = policy.run(task, conditioning, None, policy.generators([1, 2]))
    expected = policy.generate(conditioning, policy.generators([1, 2]), STEPS, 3.0, "latent")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_run_trains_on_it():
    trainer = tiny.trainer(tiny.policy(tiny.flux()), train__grid="stock")
    torch.testing.assert_close(trainer.rollouts.grid, sampled("FluxPipeline", 6), rtol=0, atol=1e-7)
    assert trainer.run_epoch()["log_ratio_max"] < 1e-6


def test_the_memory_of_a_run_is_told_on_it():
    policy, grids = tiny.policy(tiny.flux()), ("stock", "shifted")
    own, other = (memory.memory(policy, tiny.config(train__grid=grid), policy.encode(["red"])) for grid in grids)
    assert own == other and own["rollout"]["recorded states"] > 0
