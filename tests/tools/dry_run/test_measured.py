"""Bytes that a run on a CPU keeps, against `check --gpu` and `check FOLDER`: weights, LoRA, optimizer, recorded states.
"""

import gc

import pytest
import torch
from diffusers import SD3Transformer2DModel

from flowgrpo.text import memory as text_memory
from flowgrpo.tools.check.tiny.parts import lively
from flowgrpo.tools.dry_run import estimate
from flowgrpo.training import memory, sampling
from tests.helpers import tiny, tiny_text

RANK = 32
CALL = {"max_sequence_length": 2, "height": 64, "width": 64}
IMAGES = dict(precision="bf16", image__call=CALL, adapter__rank=RANK, train__updates=2)


def near(count):
    return pytest.approx(count, rel=0.05)


def image_pipeline():
    """A tiny SD3 with a denoiser 128 wide, beside which the allocator's steps of 512 bytes are small."""
    pipe = tiny.sd3()
    pipe.register_modules(transformer=lively(SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=32,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=128, pooled_projection_dim=32,
        pos_embed_max_size=16, qk_norm="rms_norm")))
    return pipe.to(torch.bfloat16)


def image_trainer(config):
    policy = tiny.PipelinePolicy(image_pipeline(), config.adapter, precision="bf16", call=CALL)
    return tiny.Trainer(config, tiny.Accelerator(cpu=True), policy, {"red": tiny.red},
                        ([tiny.Prompt(text) for text in tiny.PROMPTS], []))


def text_trainer(config):
    policy = tiny_text.CausalLM(*tiny_text.model(hidden_size=128, intermediate_size=256), config.adapter, config.text)
    return tiny_text.trainer(policy, adapter__rank=RANK, method=config.method)


def kept(make, config):
    """Return a trainer whose second epoch has been sampled, and the bytes of all tensors that are alive, by what they
    are: frozen weights, LoRA, what an update leaves, and what a rollout leaves."""
    with memory.Peak() as seen:
        def alive():
            gc.collect()
            return sum(seen._alive.values())
        trainer = make(config)
        weights = alive()
        trainer.run_epoch()
        updated = alive()
        epoch = sampling.draw(trainer)
        recorded = alive() - updated
    assert epoch.parts
    lora = sum(parameter.nbytes for parameter in trainer.policy.weights.parameters())
    return trainer, {"weights": weights - lora, "lora": lora, "optimizer": updated - weights, "states": recorded}


@pytest.mark.parametrize("method", ["flow_grpo", "diffusion_nft"])
def test_an_image_model_keeps_what_both_tables_say(method, monkeypatch):
    config = tiny.config(method=method, **IMAGES)
    trainer, found = kept(image_trainer, config)
    told = memory.memory(trainer.policy, config, trainer.policy.encode(["red"]))["update"]
    assert sum(told[name] for name in ("text encoders", "denoisers", "vae", "other")) == near(found["weights"])
    assert told["trained"] == found["lora"]
    assert told["gradients and optimizer"] + told.get("averages", 0) == near(found["optimizer"])
    assert told["recorded states"] == near(found["states"])
    clocks, extrapolated = [], estimate._extrapolated
    monkeypatch.setattr(estimate, "_extrapolated", lambda meta, clock, *counts: (
        clocks.append(clock), extrapolated(meta, clock, *counts))[1])
    estimate.dry_run(config, pipe=image_pipeline())
    assert clocks[0].began == near(found["weights"] + found["lora"] + found["optimizer"])
    assert clocks[0].drawn - clocks[0].began == near(found["states"])


def test_recorded_states_take_their_bytes_for_each_prompt():
    """Between dry runs of more prompts: 4 samples of 6 states, which are 4 x 32 x 32 in bf16."""
    peaks = [estimate.dry_run(tiny.config(method="flow_grpo", train__prompts=prompts, **IMAGES),
                              pipe=image_pipeline()).phases["update"].allocated for prompts in (2, 6)]
    assert (peaks[1] - peaks[0]) / 4 == near(4 * 7 * 4 * 32 * 32 * 2)


@pytest.mark.parametrize("method", ["grpo"])
def test_a_language_model_keeps_what_the_table_says(method):
    config = tiny_text.config(adapter__rank=RANK, method=method)
    trainer, found = kept(text_trainer, config)
    told = text_memory.memory(trainer.policy, config, trainer.policy.encode(["1+2="]))["update"]
    assert told["model"] == near(found["weights"]) and told["trained"] == found["lora"]
    assert told["gradients and optimizer"] == near(found["optimizer"])
    assert found["states"] < 0.01 * found["lora"]  # tokens and their log-probabilities
