"""Gradient checkpointing changes what is held and nothing else: where diffusers computes blocks again, where it cannot,
and where it computes something else."""

from __future__ import annotations

import pytest
import torch

from flowgrpo.check import memory, report, tiny
from flowgrpo.config import Config
from flowgrpo.config.sections import Adapter
from flowgrpo.errors import UserError
from flowgrpo.policies.pipelines import mid_loop_check
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights import checkpointing
from flowgrpo.samplers.scheduler import Segment

# HunyuanDiT has no checkpointing in diffusers, Chroma's leaves a mask out, PAG's attention is there for a call alone.
NAMES = ["StableDiffusion3Pipeline", "StableDiffusionPipeline", "WanPipeline", "HunyuanDiTPipeline", "ChromaPipeline",
         "StableDiffusionPAGPipeline"]


def replayed(name: str, checkpointing: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(a step's output, the gradient of its size, bytes that were held for it)."""
    pipe, call = tiny.make(name)
    torch.manual_seed(0)
    policy = PipelinePolicy(pipe, Adapter(rank=2), call=call, checkpointing=checkpointing, guidance=3.0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.weights.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    conditioning, (grid, timesteps) = policy.encode(["red"], ["old"]), mid_loop_check.few_steps(policy, 3)
    x, _ = policy.run(Segment(grid, range(1), timesteps=timesteps), conditioning, None, policy.generators([0]))
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    held = memory.kept(modules, lambda: policy.replay(conditioning, x, grid, 1, timesteps))
    output = policy.replay(conditioning, x, grid, 1, timesteps)
    output.square().mean().backward()
    gradients = [p.grad.flatten() for p in policy.weights.parameters() if p.grad is not None]
    return output.detach(), torch.cat(gradients), held


@pytest.mark.parametrize("name", NAMES)
def test_the_same_gradient_for_less_memory(name):
    (plain, expected, held), (output, gradient, less) = (replayed(name, each) for each in (False, True))
    torch.testing.assert_close(output, plain, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())
    assert expected.norm() > 0 and less < 0.2 * held


@pytest.mark.parametrize("name", ["HunyuanDiTPipeline", "ChromaPipeline", "StableDiffusionXLPAGPipeline"])
def test_a_check_with_checkpointing_is_of_the_run_with_it(name):
    told = report.report(name, Config(method="ddpo", precision="fp32", adapter={"rank": 4},
                                      train={"checkpointing": True}))
    assert told["drivable"], told["reason"]
    assert told["first_log_ratio"] == 0


def test_checkpointing_that_computes_something_else_is_found_out(monkeypatch):
    monkeypatch.setattr(checkpointing, "WRONG", set())
    told = report.report("ChromaPipeline", Config(precision="fp32", adapter={"rank": 4}, train={"checkpointing": True}))
    assert not told["drivable"] and told["first_log_ratio"] > 1e-4
    assert told["reason"].startswith("replay and rollout disagree")
    assert told["reason"].endswith("try without train.checkpointing")


@pytest.mark.parametrize("module, compiled, told", [
    (torch.nn.Linear(2, 2), False, "Linear has no list of blocks: use false$"),
    (tiny.make("HunyuanDiTPipeline")[0].transformer, True, "HunyuanDiT2DModel .* not with train.compile: "),
])
def test_a_denoiser_whose_blocks_cannot_be_computed_again_is_refused(module, compiled, told):
    with pytest.raises(UserError, match=f"^train.checkpointing is true, but {told}"):
        checkpointing.checkpoint_blocks(module, torch.no_grad, compiled)
