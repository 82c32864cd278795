"""A run that starts from an existing LoRA: the same values, or one line that says what differs."""

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo.config import validate
from flowgrpo.config.sections import Adapter, Text
from flowgrpo.export import model_card, usage
from flowgrpo.policies import build, checkpoints, loading, options, sources
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.tools.check import report
from flowgrpo.tools.check.tiny import make
from tests.helpers import loop, tiny, tiny_text
from tests.helpers.refusals import message, refused
from tests.helpers.tiny_runs import assert_same_weights


def saved(folder, pipe=None, **adapter):
    """A folder with a LoRA that is not the base's, and its weights."""
    policy = tiny.stir(PipelinePolicy(pipe or tiny.sd3(), Adapter(**{"rank": 2} | adapter), call=tiny.CALL))
    policy.weights.save(folder)
    return policy.weights.snapshot()


def started(path, pipe=None, precision: str = "fp32", **adapter) -> PipelinePolicy:
    settings = Adapter(**{"rank": 2, "init": str(path)} | adapter)
    return PipelinePolicy(pipe or tiny.sd3(), settings, call=tiny.CALL, precision=precision)


@pytest.mark.parametrize("adapter", [{}, {"dora": True}, {"rslora": True}, {"alpha": 4.0}])
def test_a_run_starts_from_a_lora(adapter, tmp_path):
    values = saved(tmp_path, **adapter)
    policy = started(tmp_path, **adapter)
    assert_same_weights(policy.weights.snapshot(), values)
    assert all(parameter.requires_grad for parameter in policy.weights.parameters())
    tiny.stir(policy).weights.save(tmp_path / "next")  # the whole LoRA
    after = load_file(tmp_path / "next" / LORA_FILE)
    name, value = next(iter(policy.weights.named.items()))
    assert torch.equal(after[name.replace(".default", "")], value) and not torch.equal(value, values[name])


@pytest.mark.parametrize("first, then, change", [
    ({"alpha": 3.0}, {}, 0.75), ({}, {"alpha": 3.0}, 4 / 3), ({"rslora": True}, {"alpha": 2.0}, 2.0)])
def test_a_run_starts_from_a_lora_of_another_scale(first, then, change, tmp_path):
    values = saved(tmp_path, **first)
    for key, value in started(tmp_path, **then).weights.snapshot().items():
        torch.testing.assert_close(value, values[key] * (change if ".lora_B." in key else 1), rtol=3e-7, atol=0)


def test_a_file_does_and_its_values_keep_their_precision(tmp_path):
    values = saved(tmp_path)
    policy = started(tmp_path / LORA_FILE, tiny.sd3().to(torch.bfloat16), "bf16")
    assert_same_weights(policy.weights.snapshot(), values)


def test_a_class_without_a_loader_starts_too(tmp_path):
    (pipe, call), (other, _) = make("PixArtSigmaPipeline"), make("PixArtSigmaPipeline")
    policy = tiny.stir(PipelinePolicy(pipe, Adapter(rank=2), call=call))
    policy.weights.save(tmp_path)
    again = PipelinePolicy(other, Adapter(rank=2, init=str(tmp_path)), call=call)
    assert_same_weights(again.weights.snapshot(), policy.weights.snapshot())


def test_a_language_model_starts_from_a_lora(tmp_path):
    policy = tiny.stir(CausalLM(*tiny_text.model(), Adapter(rank=2), Text()))
    policy.weights.save(tmp_path)
    again = CausalLM(*tiny_text.model(), Adapter(rank=2, init=str(tmp_path)), Text())
    assert_same_weights(again.weights.snapshot(), policy.weights.snapshot())
    refused("has rank 2, expected adapter.rank 3: set --adapter.rank=2 ", CausalLM, *tiny_text.model(),
            Adapter(rank=3, init=str(tmp_path)), Text())


@pytest.mark.parametrize("adapter, told", [
    ({"rank": 4}, "its LoRA has rank 2, expected adapter.rank 4: set --adapter.rank=2 --adapter.alpha=2 --adapter.tar"),
    ({"targets": ["to_q"]}, "has a layer transformer.transformer_blocks"),
    ({"targets": [*Adapter().targets, "proj_out"]}, "has no layer transformer.proj_out, which adapter.targets do name"),
    ({"dora": True}, "its LoRA is no DoRA, expected adapter.dora false: set --adapter.rank=2 ")])
def test_a_lora_that_differs_is_refused(adapter, told, tmp_path):
    saved(tmp_path)
    pipe = tiny.sd3()
    assert told in message(started, tmp_path, pipe, **adapter)
    assert list(pipe.transformer.peft_config) == ["default"]


def test_another_models_lora_is_refused(tmp_path):
    saved(tmp_path, tiny.flux())
    refused("does not load into|holds no LoRA layer|its LoRA has|layers are applied to", started, tmp_path)


def check(**settings) -> None:
    options.check(loop.setup(validate(settings)))


def test_it_is_looked_for_before_anything_is_loaded(tmp_path):
    saved(tmp_path / "lora")
    model = str(tiny.save(tiny.sd3(), tmp_path / "model"))
    check(adapter={"init": str(tmp_path / "lora"), "rank": 2}, model=model)
    told = message(check, adapter={"init": str(tmp_path / "lora")}, model=model)
    assert "its LoRA has rank 2, expected adapter.rank 32: set --adapter.rank=2" in told
    told = message(check, adapter={"init": str(tmp_path / "lora"), "rank": 0})
    assert told.startswith("adapter.init is ") and ", but adapter.rank is 0, so no LoRA is trained" in told
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    assert "the run has not finished: --resume it" in message(check, adapter={"init": str(tmp_path / "run")})


def test_a_checkpoint_needs_no_longer_what_its_run_started_from():
    assert checkpoints._fresh(Adapter(rank=3, init="gone")) == Adapter(rank=3)


def merged(folder, scale: float):
    """The tiny SD3's transformer with a LoRA of a folder at a scale, added by hand."""
    weights = dict(tiny.sd3().transformer.named_parameters())
    lora = load_file(folder / LORA_FILE)
    for key in [key for key in lora if key.endswith(".lora_A.weight")]:
        name = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
        change = lora[key.replace("lora_A", "lora_B")] @ lora[key]
        weights[f"{name}.weight"] = weights[f"{name}.weight"].detach() + scale * change
    return weights


def test_loras_are_fused_before_another_is_trained(tmp_path):
    model = tiny.save(tiny.sd3(), tmp_path / "model")
    saved(tmp_path / "turbo")
    given = {"path": str(tmp_path / "turbo" / LORA_FILE), "scale": 0.5}
    config = validate({"model": str(model), "precision": "fp32", "load": {"lora": [str(tmp_path / "turbo"), given]},
                       "adapter": {"rank": 2}, "image": {"call": tiny.CALL}})
    pipe = build.load(config)
    assert not hasattr(pipe.transformer, "peft_config")
    for key, value in merged(tmp_path / "turbo", 1.5).items():
        torch.testing.assert_close(pipe.transformer.get_parameter(key), value, atol=1e-6, rtol=1e-5)
    policy = build.make_policy(config, "cpu", pipe)
    assert all((value == 0).all() for key, value in policy.weights.named.items() if "lora_B" in key)
    drawn = loading.make_pipeline(str(model), "fp32", files=loading.files_of(config, str(model)))
    key = "transformer_blocks.0.attn.to_q.weight"
    torch.testing.assert_close(drawn.transformer.get_parameter(key), merged(tmp_path / "turbo", 1.5)[key])


def test_the_base_of_a_lora_is_named(tmp_path):
    files = {"lora": [{"path": "turbo.safetensors", "scale": 0.8}, "other"], "denoiser": "d.gguf"}
    config = validate({"model": "owner/model", "load": files})
    base = ("`owner/model` with its denoiser from `d.gguf`, fused with `turbo.safetensors` at scale 0.8, `other` at "
            "scale 1")
    assert sources.base(config.model, config.load) == base
    assert f"\n\nIts base is {base}: on another" in model_card._base(config) and not model_card._base(validate({}))
    assert report._notes(config)[-1] == f"the LoRA's base is {base}" and not report._notes(validate({}))
    code = usage.snippet(config, tmp_path, "me/repository", "a star")
    assert "lora=[{'path': 'turbo.safetensors', 'scale': 0.8}, 'other']" in code
    compile(code, "snippet", "exec")


def test_integer_weights_take_no_fused_lora_and_another_starts_on_them(tmp_path):
    values, model = saved(tmp_path / "lora"), tiny.save(tiny.sd3(), tmp_path / "model")
    told = message(check, load={"lora": [str(tmp_path / "lora")]}, memory={"weights": "int8"})
    assert told.startswith("load.lora is set, but memory.weights is 'int8'")
    policy = started(tmp_path / "lora", load_pipeline(str(model), weights="int8"))
    assert_same_weights(policy.weights.snapshot(), values)
