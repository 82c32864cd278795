"""Gradient checkpointing changes what is held and nothing else: where diffusers computes blocks again, where it cannot,
and where it computes something else."""

import pytest
import torch

from flowgrpo.config import Config
from flowgrpo.config.sections import Adapter
from flowgrpo.policies.pipelines import probes
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights import checkpointing
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.tools.check import report, tiny
from flowgrpo.training import memory
from tests.helpers import tiny_text
from tests.helpers.refusals import refused
from tests.helpers.tiny import stir

# HunyuanDiT has no checkpointing in diffusers, Chroma's leaves a mask out, PAG's attention is there for a call alone,
# HunyuanImage gives its blocks arguments by name, and two are ModularPipelines.
NAMES = ["StableDiffusion3Pipeline", "StableDiffusionPipeline", "WanPipeline", "HunyuanDiTPipeline", "ChromaPipeline",
         "StableDiffusionPAGPipeline", "HunyuanImagePipeline", "AnimaModularPipeline", "Flux3ModularPipeline"]


def replayed(name: str, checkpointing: float) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(a step's output, the gradient of its size, bytes that were held for it)."""
    pipe, call = tiny.make(name)
    torch.manual_seed(0)
    policy = stir(PipelinePolicy(pipe, Adapter(rank=2), call=call, checkpointing=checkpointing, guidance=3.0), 0.2)
    conditioning, (grid, timesteps) = policy.encode(["red"], ["old"]), probes.few_steps(policy, 3)
    x, _ = policy.run(Segment(grid, range(1), timesteps=timesteps), conditioning, None, policy.generators([0]))
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    held = memory.activation_bytes(modules, lambda: policy.replay(conditioning, x, grid, 1, timesteps))
    output = policy.replay(conditioning, x, grid, 1, timesteps)
    output.square().mean().backward()
    gradients = [p.grad.flatten() for p in policy.weights.parameters() if p.grad is not None]
    return output.detach(), torch.cat(gradients), held


@pytest.mark.parametrize("name", NAMES)
def test_the_same_gradient_for_less_memory(name):
    (plain, expected, held), (output, gradient, less) = (replayed(name, each) for each in (False, True))
    torch.testing.assert_close(output, plain, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())
    assert expected.norm() > 0 and less < 0.25 * held  # of FLUX.3's tiny one 0.24 is beside its few blocks


@pytest.mark.parametrize("name", ["WanPipeline", "StableDiffusionPipeline", "HunyuanDiTPipeline"])
def test_the_larger_the_share_of_blocks_that_recompute_the_less_is_held(name):
    results = [replayed(name, share) for share in (0.0, 0.5, 1.0)]
    held = [bytes_held for _, _, bytes_held in results]
    assert held[0] > held[1] > held[2] > 0, held
    largest = results[0][1].abs().max().item()
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize("share, chosen", [(1.0, 8 * [True]), (0.5, 4 * [True, False]), (0.0, 8 * [False]),
                                           (0.3, [True, False, False, True, False, False, True, False])])
def test_a_share_of_the_blocks_is_evenly_spread(share, chosen):
    blocks = [torch.nn.Identity() for _ in range(8)]
    choice = checkpointing.chooser(share)
    assert [choice(block) for block in blocks] == chosen == [choice(block) for block in blocks]


@pytest.mark.parametrize("name", ["StableDiffusionPipeline", "HunyuanDiTPipeline"])
def test_the_share_can_change_on_a_policy(name):
    pipe, call = tiny.make(name)
    policy = PipelinePolicy(pipe, Adapter(rank=2), call=call)
    conditioning, (grid, timesteps) = policy.encode(["red"]), probes.few_steps(policy, 3)
    x, _ = policy.run(Segment(grid, range(1), timesteps=timesteps), conditioning, None, policy.generators([0]))
    modules, held = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)], []
    for share in (0.0, 1.0, 0.0, 0.5):
        policy.checkpoint(share)
        held.append(memory.activation_bytes(modules, lambda: policy.replay(conditioning, x, grid, 1, timesteps)))
    assert held[0] == held[2] > held[3] > held[1], held


def test_a_share_of_a_language_models_layers_recomputes():
    held, gradients = [], []
    for share in (0.0, 0.5, 1.0):
        own = tiny_text.stir(tiny_text.policy(checkpointing=share))
        ids = torch.tensor([[1, 2, 3, 4, 5]])
        held.append(memory.activation_bytes([own.model], lambda: own.model(input_ids=ids, use_cache=False).logits))
        own.model(input_ids=ids, use_cache=False).logits.square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in own.weights.parameters()]))
    assert held[0] > held[1] > held[2] > 0, held
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["HunyuanDiTPipeline", "ChromaPipeline", "StableDiffusionXLPAGPipeline"])
def test_a_check_with_checkpointing_is_of_the_run_with_it(name):
    told = report.report(name, Config(method="ddpo", precision="fp32", adapter={"rank": 4},
                                      train={"checkpointing": True}))
    assert told["supported"], told["reason"]
    assert told["first_log_ratio"] == 0


def test_checkpointing_that_computes_something_else_is_found_out(monkeypatch):
    monkeypatch.setattr(checkpointing, "WRONG", set())
    told = report.report("ChromaPipeline", Config(precision="fp32", adapter={"rank": 4}, train={"checkpointing": True}))
    assert not told["supported"] and told["first_log_ratio"] > 1e-4
    assert told["reason"].startswith("replay and rollout disagree")
    assert told["reason"].endswith("try without train.checkpointing")


@pytest.mark.parametrize("module, compiled, told", [
    (torch.nn.Linear(2, 2), False, "Linear has no list of blocks: use false$"),
    (tiny.make("HunyuanDiTPipeline")[0].transformer, True, "HunyuanDiT2DModel .* not go with train.compile: ")])
def test_a_denoiser_whose_blocks_cannot_be_computed_again_is_refused(module, compiled, told):
    refused(f"^train.checkpointing is on, but {told}", checkpointing.checkpoint_blocks, module, torch.no_grad, compiled)
