"""The stock grid is the one that a user of the stock pipeline samples with, whatever the scheduler is told."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flowgrpo.samplers.scheduler import Segment
from flowgrpo.tools.check.tiny import make
from flowgrpo.training import memory
from tests.helpers import tiny

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
