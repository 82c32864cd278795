"""Variance-preserving pipelines, each against its own stock loop: DDIM without noise, consistency sampling with it."""

import inspect

import pytest
import torch
from diffusers import DDIMScheduler

from flowgrpo.config.sections import Adapter
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.samplers.grids import alpha_bars
from flowgrpo.samplers.kernels import VPCPS
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.tools.check import tiny
from flowgrpo.tools.check.tiny import unets

STEPS = 4
DDIM = ["StableDiffusionPipeline", "StableDiffusionXLPipeline", "KolorsPipeline", "StableDiffusionInpaintPipeline",
        "StableDiffusionControlNetPipeline", "StableDiffusionXLControlNetPipeline",
        "StableDiffusionPipeline (IP-Adapter)", "StableDiffusionPAGPipeline", "StableDiffusionXLPAGPipeline",
        "PixArtAlphaPipeline", "PixArtSigmaPipeline", "HunyuanDiTPipeline", "CogView3PlusPipeline"]


def driven(name: str, kind=None, **options) -> PipelinePolicy:
    """A policy over the tiny `name`, at guidance 3; its scheduler of the class `kind`, with the options that it has."""
    pipe, call = tiny.make(name)
    kind = kind or type(pipe.scheduler)
    options = {key: value for key, value in options.items() if key in inspect.signature(kind).parameters}
    pipe.register_modules(scheduler=kind.from_config(pipe.scheduler.config, **options))
    return PipelinePolicy(pipe, Adapter(rank=1), guidance=3.0, call=call)


@pytest.mark.parametrize("name", DDIM)
def test_without_noise_it_gives_the_latents_of_ddim(name):
    # With this spacing DDIM itself goes from each timestep to the next.
    options = {"timestep_spacing": "trailing", "set_alpha_to_one": True, "clip_sample": False}
    policy = driven(name, **options)
    ddim = policy if "DDIM" in type(policy.stock).__name__ else driven(name, DDIMScheduler, **options)
    grid, timesteps = alpha_bars(policy.stock, STEPS)
    conditioning = policy.encode(["red", "blue"], ["", "old"])
    segment = Segment(grid, range(STEPS), timesteps=timesteps)
    ours, _ = policy.run(segment, conditioning, None, policy.generators([1, 2]))
    stock = ddim.generate(ddim.encode(["red", "blue"], ["", "old"]), ddim.generators([1, 2]), STEPS, 3.0, "latent")
    # A terminal signal of zero counts as 2^-12 of the state.
    tolerance = 2e-3 if name == "CogView3PlusPipeline" else 2e-5
    assert (ours - stock).abs().max() <= tolerance * stock.abs().max()
    other, _ = policy.run(segment, conditioning.rows(torch.tensor([1, 0])), None, policy.generators([1, 2]))
    assert (other - ours).abs().max() > 0.01 * ours.std() and (ours[0] - ours[1]).abs().max() > 0.1 * ours.std()


def test_consistency_sampling_gives_the_stock_latents_and_images():
    policy = driven("LatentConsistencyModelPipeline")
    grid, timesteps = alpha_bars(policy.stock, STEPS)
    conditioning, generators = policy.encode(["red", "blue"]), policy.generators([1, 2])
    drawn = frozenset(range(STEPS - 1))  # the last step gives the data
    task = Segment(grid, range(STEPS), VPCPS(1.0), stochastic=drawn, generators=generators, timesteps=timesteps)
    ours, _ = policy.run(task, conditioning, None, generators)
    latents, pictures = (policy.generate(conditioning, policy.generators([1, 2]), STEPS, 3.0, kind)
                         for kind in ("latent", "pt"))
    torch.testing.assert_close(ours, latents, rtol=0, atol=1e-4)
    torch.testing.assert_close(policy.decode(ours, conditioning), pictures, rtol=0, atol=1e-4)


def test_embedded_guidance_of_a_consistency_model_is_one_evaluation():
    policy = driven("LatentConsistencyModelPipeline")
    grid, timesteps = alpha_bars(policy.stock, 1)
    conditioning, finals, before = policy.encode(["red"]), [], policy.evaluations
    for policy.guidance in (1.0, 8.0):
        finals.append(policy.run(Segment(grid, range(1), timesteps=timesteps), conditioning, torch.ones(1, 4, 8, 8))[0])
    assert policy.evaluations == before + 2 and (finals[0] - finals[1]).abs().max() > 0.01


@pytest.mark.parametrize("name", [*unets.FACTORIES])
def test_they_are_small_and_repeatable(name):
    weights = [dict(tiny.make(name, seed)[0].components) for seed in (0, 0, 1)]
    first, again, other = ([p for part in sorted(parts) if isinstance(parts[part], torch.nn.Module)
                            for p in parts[part].parameters()] for parts in weights)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert sum(p.numel() for p in first) < 400_000 and all(p.isfinite().all() for p in first)
