"""Hints on a machine and on a model: each on its condition, with the numbers."""

from __future__ import annotations

import pytest
import torch

from flowgrpo import device
from flowgrpo.config import Config, validate
from flowgrpo.methods import preset
from flowgrpo.tools.check.tiny import make
from flowgrpo.tools.check.tiny.images import flux
from flowgrpo.tools.check.tiny.parts import flux_transformer
from flowgrpo.training import loading


def test_bf16_that_a_cpu_emulates_is_named_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(loading, "bf16_speed", lambda: 0.28)
    [line] = loading.of_machine("bf16", "cpu")
    assert "multiplies it 0.28 times as fast as fp32: --precision=fp32" in line
    for asked in (("auto", "cpu"), ("fp32", "cpu"), ("bf16", "cuda")):
        assert [*loading.of_machine(*asked)] == []
    monkeypatch.setattr(loading, "bf16_speed", lambda: 4.0)
    assert [*loading.of_machine("bf16", "cpu")] == []
    assert device.bf16_speed() > 0


def told(pipe, method="mix_grpo", **given):
    return [*loading.of_steps(validate({"model": "m", "method": method, **given}), preset(method), pipe)]


def test_a_model_that_only_its_weights_show_to_be_of_few_steps_is_hinted_at():
    schnell = flux(transformer=flux_transformer(guidance_embeds=False))
    assert told(schnell) == [
        "hint: m is taken for a model of few steps (its transformer has no guidance, as that of FLUX schnell), whose "
        "steps and guidance are not those of other models: --train.steps=4 --eval.steps=4 --eval.guidance=1, or those "
        "of its card"]
    [rest] = told(schnell, train={"steps": 6}, eval={"steps": 6})
    assert "other models: --eval.guidance=1, or" in rest
    assert told(schnell, train={"steps": 6}, eval={"steps": 6, "guidance": 1.0}) == []
    assert told(make("StableDiffusionPipeline")[0]) == [] == [*loading.of_steps(Config(model="calcms"), preset(
        "mix_grpo"), make("FluxPipeline")[0])]


@pytest.mark.parametrize("method, blurs", [("diffusion_nft", True), ("awm", True), ("sol_rl+diffusion_nft", True),
                                           ("mix_grpo", False), ("draft", False)])
def test_a_method_that_blurs_models_of_few_steps_says_so_whatever_is_given(method, blurs):
    lcm = make("LatentConsistencyModelPipeline")[0]
    lines = told(lcm, method, train={"steps": 4, "guidance": 8.0}, eval={"steps": 4, "guidance": 8.0})
    assert lines == [f"hint: {method} trains on noised samples, which blurs a model of few steps (its scheduler is a "
                     "LCMScheduler): take --method=rlcm, which trains the model's own steps, or set a limit: "
                     "docs/reward_hacking.md"] * blurs
