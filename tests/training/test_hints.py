"""Hints on a machine and on a model: each on its condition, with the numbers."""

from __future__ import annotations

import pytest
import torch

from flowgrpo.check.tiny import make
from flowgrpo.check.tiny.images import flux
from flowgrpo.check.tiny.parts import flux_transformer
from flowgrpo.config import Config, validate
from flowgrpo.training import loading


def test_bf16_that_a_cpu_emulates_is_named_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(loading, "bf16_speed", lambda: 0.28)
    [line] = loading.of_machine("bf16", "cpu")
    assert "multiplies it 0.28 times as fast as fp32: --precision=fp32" in line
    for precision, device in (("auto", "cpu"), ("fp32", "cpu"), ("bf16", "cuda")):
        assert [*loading.of_machine(precision, device)] == []
    monkeypatch.setattr(loading, "bf16_speed", lambda: 4.0)
    assert [*loading.of_machine("bf16", "cpu")] == []
    assert device.bf16_speed() > 0


def turbo(name, **options):
    """A tiny pipeline with a scheduler of these options."""
    pipe = make(name)[0]
    pipe.scheduler = type(pipe.scheduler).from_config(dict(pipe.scheduler.config) | options)
    return pipe


@pytest.mark.parametrize("made, model, told", [
    (lambda: make("LatentConsistencyModelPipeline")[0], "m", "(its scheduler is a LCM"),
    (lambda: turbo("StableDiffusionXLPipeline", timestep_spacing="trailing"), "m", "(its scheduler spaces t"),
    (lambda: flux(transformer=flux_transformer(guidance_embeds=False)), "m", "(its transformer has no"),
    (lambda: make("StableDiffusion3Pipeline")[0], "owner/sd3.5-large-turbo", "(by its name)"),
    (lambda: make("StableDiffusionPipeline")[0], "owner/plain", None),
    (lambda: make("FluxPipeline")[0], "calcms", None)])
def test_a_model_of_few_steps_with_default_steps_is_hinted_at(made, model, told):
    given, pipe = Config(model=model), made()
    if told is None:
        assert [*loading.of_steps(given, pipe)] == []
        return
    [line] = loading.of_steps(given, pipe)
    assert f"{model} is taken for a model of few steps {told}" in line
    assert "train.steps is 10, eval.steps is 20, eval.guidance is 4.5 by default" in line
    assert "--train.steps=4 --eval.steps=4 --eval.guidance=1" in line
    assert ("rlcm trains its own steps" in line) is told.startswith("(its scheduler is")
    assert line.endswith("methods that train on noised samples (diffusion_nft, awm, diffusion_dpo) blur such models")
    own = validate({"model": model, "train": {"steps": 4}, "eval": {"steps": 4, "guidance": 1.0}})
    assert [*loading.of_steps(own, pipe)] == []
    [rest] = loading.of_steps(validate({"model": model, "train": {"steps": 4}, "eval": {"steps": 4}}), pipe)
    assert "but eval.guidance is 4.5 by default" in rest
