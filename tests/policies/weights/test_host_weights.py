"""Frozen weights that wait in the CPU's memory: where they are while a model samples and learns, and the same results.

A policy on the meta device stands for one on a GPU: torch refuses a product of tensors on two devices there too.
"""

import itertools

import pytest
import torch
from peft import LoraConfig

from flowgrpo.config import load
from flowgrpo.config.sections import Adapter, Memory
from flowgrpo.data.prompts import Prompt
from flowgrpo.policies import loading
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights.memory_options import offload, require_waiting
from flowgrpo.run import run
from flowgrpo.training import memory
from tests.helpers import loop, tiny
from tests.helpers.refusals import message
from tests.helpers.syncs import META, HostSyncs

LEVELS = ("block_level", "leaf_level")
TURNS = {"encoders": "cpu", "denoiser": "cpu"}


def on_meta(pipe=None, **memory) -> PipelinePolicy:
    return PipelinePolicy(pipe or tiny.sd3(), Adapter(rank=2), device=META, call=tiny.CALL, checkpointing=1.0,
                          memory=Memory(**memory))


def frozen(module: torch.nn.Module) -> set[str]:
    """Device types of a module's weights that are not trained."""
    return {tensor.device.type for tensor in [*module.parameters(), *module.buffers()] if not tensor.requires_grad}


def trained(policy: PipelinePolicy) -> set[str]:
    return {parameter.device.type for parameter in policy.weights.parameters()}


def step(policy: PipelinePolicy) -> None:
    """Sample a step and learn from it."""
    x, grid = torch.zeros(1, *tiny.LATENTS, device=policy.device), torch.tensor([1.0, 0.6, 0.0])
    policy.replay(policy.encode(["red"]), x, grid, 1).square().mean().backward()


@pytest.mark.parametrize("level", LEVELS)
def test_weights_of_blocks_come_for_their_forward_alone(level):
    policy, seen = on_meta(offload=level), []
    module = policy.denoisers["transformer"]
    blocks = list(module.transformer_blocks)
    for block in blocks:
        layer = block.attn.to_q.base_layer
        layer.register_forward_pre_hook(lambda one, _: seen.append(
            ([frozen(each) == {"meta"} for each in blocks], one.weight.device.type)))
    with HostSyncs():
        step(policy)
    # A layer of its own comes behind this hook.
    expected = {(1, "meta")} if level == "block_level" else {(0, "cpu")}
    assert len(seen) >= 2 * len(blocks) and {(sum(here), device) for here, device in seen} == expected
    assert all(frozen(block) == {"cpu"} for block in blocks) and trained(policy) == {"meta"}
    assert frozen(module.proj_out) == frozen(module.pos_embed) == {"meta"}
    assert any(parameter.grad is not None for parameter in policy.weights.parameters())


def test_denoiser_and_text_encoders_are_on_the_device_by_turns():
    policy, seen = on_meta(**TURNS), []
    module = policy.denoisers["transformer"]
    def look(*_):
        seen.append((frozen(module), {tensor.device.type for tensor in policy.encoders.modules[0].parameters()}))
    assert frozen(module) == {"cpu"} and trained(policy) == {"meta"}
    policy.encoders.modules[0].register_forward_pre_hook(look)
    module.register_forward_pre_hook(look)
    with HostSyncs():
        for _ in range(2):
            step(policy)
    turns = [place for place, _ in itertools.groupby(seen)]
    assert turns == 2 * [({"cpu"}, {"meta"}), ({"meta"}, {"cpu"})] and trained(policy) == {"meta"}


OPTIONS = [{"memory": TURNS}, {"memory": {"offload": "block_level"}, "train__checkpointing": True},
           {"memory": {"offload": "leaf_level", "encoders": "cpu"}, "train__checkpointing": True}]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_run_learns_the_same(options, model, tmp_path):
    results = []
    for name, chosen in (("plain", {}), ("waiting", options)):
        config = tiny.config(tmp_path / name, model=str(model), train__lr=1e-2, **chosen)
        summary = run(config, functions={"red": tiny.red}, prompts=[Prompt(text) for text in tiny.PROMPTS])
        results.append((summary, (config.folder / "pytorch_lora_weights.safetensors").read_bytes()))
    (plain, expected), (summary, weights) = results
    assert summary["max_first_log_ratio"] == 0 and summary["after"] == plain["after"] and weights == expected


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_quantised_blocks_wait_too(weights, model):
    pipe = load_pipeline(str(model), weights=weights)
    policy = on_meta(pipe, offload="block_level")
    [block, *_] = policy.denoisers["transformer"].transformer_blocks
    inner = [getattr(block.attn.to_q.base_layer.weight, name) for name in ("qdata", "scale")]
    assert {tensor.device.type for tensor in inner} == {"cpu"}
    with HostSyncs():
        step(policy)
    assert [getattr(block.attn.to_q.base_layer.weight, name) for name in ("qdata", "scale")] == inner


@pytest.mark.parametrize("options", [TURNS, {"offload": "leaf_level"}])
def test_images_of_a_run_are_drawn_with_weights_that_wait(options, model, monkeypatch):
    """The pipeline takes a LoRA that is loaded later, on whatever device its block is."""
    monkeypatch.setattr(loading, "place", lambda device=None: META)
    pipe = loading.make_pipeline(str(model), "fp32", memory=Memory(**options))
    [block, *_] = pipe.transformer.transformer_blocks
    assert frozen(block) == {"cpu"} and pipe.vae.device.type == "meta"
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    assert block.attn.to_q.lora_A["default"].weight.device.type == "cpu"
    with HostSyncs():
        texts, _, pooled, _ = pipe.encode_prompt("red", None, None, device=META, **tiny.CALL)
        pipe.transformer(torch.zeros(1, *tiny.LATENTS, device=META), texts, pooled, torch.zeros(1, device=META))
    if "offload" in options:
        assert frozen(block) == {"cpu"}


def test_the_estimate_counts_the_largest_block_and_no_denoiser_beside_encoders():
    config = load(None, {"train.micro_batch": 4, "train.group": 4})
    plain, waiting, turns = (tiny.policy(memory=Memory(**options), checkpointing=1.0) for options in (
        {}, {"offload": "block_level"}, TURNS))
    of = [memory.memory(policy, config, policy.encode(["red"])) for policy in (plain, waiting, turns)]
    sizes = [memory.tensor_bytes(t for t in block.parameters() if not t.requires_grad)
             for block in plain.denoisers["transformer"].transformer_blocks]
    assert of[0]["update"]["denoisers"] - of[1]["update"]["denoisers"] == sum(sizes) - max(sizes) > 0
    assert of[2]["encode"]["denoisers"] == 0 and of[2]["update"]["denoisers"] == of[0]["update"]["denoisers"]


def test_weights_of_four_bits_and_a_denoiser_without_blocks_do_not_wait():
    chosen = {"memory.offload": "block_level", "train.checkpointing": True, "memory.weights": "nf4"}
    assert "use int8 or fp8" in message(require_waiting, loop.setup(load(None, chosen)))
    told = message(offload, torch.nn.Linear(2, 2), META, "block_level")
    assert "memory.offload is block_level, but Linear has no list of blocks" in told
