"""Adapters by peft alone: added, loaded, deleted and removed, in files that stock libraries and earlier runs share."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.functional import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from flowgrpo.config import validate
from flowgrpo.config.sections import Adapter
from flowgrpo.export import export
from flowgrpo.policies.loading import load_tuned
from flowgrpo.policies.pipelines.load import denoisers, load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights import adapters
from flowgrpo.policies.weights.lora_files import LORA_FILE, fuse
from flowgrpo.policies.weights.trainable import lora_layers
from flowgrpo.storage.atomic import write_text
from flowgrpo.text.policies import text_weights
from tests.helpers import tiny, tiny_text
from tests.helpers.refusals import message

EARLIER = Path(__file__).parents[2] / "golden" / "adapters"  # written by a2c6d4e8, by the methods of transformers
IDS = torch.tensor([[3, 4, 5, 6, 7]])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def test_stock_libraries_load_the_adapter_of_a_language_model(tmp_path):
    own, stock = tiny_text.stir(tiny_text.policy()), tiny_text.model()[0]
    assert "read back by peft" in own.weights.save(tmp_path)
    stock.load_adapter(str(tmp_path))  # by transformers
    for loaded in (PeftModel.from_pretrained(tiny_text.model()[0], tmp_path), stock):
        torch.testing.assert_close(logits(loaded), logits(own.model), rtol=0, atol=1e-6)
    assert (logits(tiny_text.model()[0]) - logits(own.model)).abs().max() > 0.01


def test_the_file_names_the_base_model(tmp_path):
    model, tokenizer = tiny_text.model()
    model.name_or_path = "some/base"
    tiny_text.policy((model, tokenizer)).weights.save(tmp_path)
    assert json.loads((tmp_path / adapters.CONFIG).read_text())["base_model_name_or_path"] == "some/base"


def test_the_adapter_of_an_earlier_language_run_loads():
    model, written = tiny_text.model()[0], load_file(EARLIER / "language" / adapters.WEIGHTS)
    text_weights.attach(model, EARLIER / "language")
    found = {f"{adapters.WRAPPED}{key}.{side}.weight": getattr(layer, side)["default"].weight
             for key, layer in lora_layers(model).items() for side in ("lora_A", "lora_B")}
    assert found.keys() == written.keys() and all(torch.equal(found[key], value) for key, value in written.items())
    assert {layer.scaling["default"] for layer in lora_layers(model).values()} == {2.0}
    assert (logits(model) - logits(tiny_text.model()[0])).abs().max() > 0.01


def test_the_adapters_of_an_earlier_pipeline_run_load():
    """In the file of diffusers, and for its T5, which diffusers does not load, in the files of peft."""
    pipe = tiny.flux()
    load_tuned(pipe, EARLIER / "flux")
    file = load_file(EARLIER / "flux" / "pytorch_lora_weights.safetensors")
    file |= {f"text_encoder_2.{key}": value
             for key, value in load_file(EARLIER / "flux" / "text_encoder_2" / adapters.WEIGHTS).items()}
    found = {f"{name}.{key}.{side}.weight": getattr(layer, side)["default"].weight
             for name in ("transformer", "text_encoder", "text_encoder_2")
             for key, layer in lora_layers(getattr(pipe, name)).items() for side in ("lora_A", "lora_B")}
    assert found.keys() == file.keys() and all(torch.equal(found[key], value) for key, value in file.items())


def earlier(folder, pipe, **adapter):
    """A pipeline's LoRA file as earlier versions wrote it, its scale beside the weights, and what its layers add."""
    policy = tiny.stir(PipelinePolicy(pipe, Adapter(**{"rank": 2} | adapter), call=tiny.CALL))
    module = policy.pipe.transformer
    type(pipe).save_lora_weights(
        folder, transformer_lora_layers=get_peft_model_state_dict(module),
        transformer_lora_adapter_metadata=module.peft_config["default"].to_dict() | {
            "target_modules": sorted(module.peft_config["default"].target_modules)})
    (folder / "config.yaml").write_text(validate({"model": str(tiny.save(tiny.sd3(), folder / "model")),
                                                  "precision": "fp32", "reward": "bright"}).yaml())
    write_text(folder / "summary.json", json.dumps({"unit": "evaluations"}))
    return {key: layer.get_delta_weight("default").detach() for key, layer in lora_layers(module).items()}


def again(folder, pipe) -> None:
    PipelinePolicy(tiny.sd3(), Adapter(rank=2, init=str(folder)), call=tiny.CALL).weights.save(folder / "next")
    pipe.load_lora_weights(folder / "next")


DOORS = {
    "sample, eval": lambda folder, pipe: load_tuned(pipe, folder),
    "sample --lora FILE": lambda folder, pipe: load_tuned(pipe, folder / LORA_FILE),
    "load.lora": lambda folder, pipe: fuse(pipe, denoisers(pipe), folder, 1.0),
    "adapter.init": lambda folder, pipe: PipelinePolicy(pipe, Adapter(rank=2, init=str(folder)), call=tiny.CALL),
    "and saved again": again,
    "merged": lambda folder, pipe: pipe.transformer.load_state_dict(
        load_pipeline(str(export.write_merged(folder, folder / "merged"))).transformer.state_dict())}


@pytest.mark.parametrize("door", DOORS)
def test_a_file_of_an_earlier_version_acts_at_its_strength(door, tmp_path):
    changes, pipe = earlier(tmp_path, tiny.sd3(), alpha=3.0, rslora=True), tiny.sd3()
    before = {key: value.clone() for key, value in pipe.transformer.state_dict().items()}
    DOORS[door](tmp_path, pipe)
    adapters.merge(pipe.transformer)
    after = pipe.transformer.state_dict()
    for key, change in changes.items():
        torch.testing.assert_close(after[f"{key}.weight"] - before[f"{key}.weight"], change, rtol=1e-4, atol=1e-6)


def test_an_export_of_an_earlier_version_acts_at_its_strength(tmp_path):
    changes = earlier(tmp_path, tiny.sd3(), alpha=3.0)
    layers = load_file(*export.lora(tmp_path, tmp_path / "kohya.safetensors"))
    for key, change in changes.items():
        down, up, alpha = (layers[f"lora_transformer_{key.replace('.', '_')}.{part}"]
                           for part in ("lora_down.weight", "lora_up.weight", "alpha"))
        torch.testing.assert_close(up @ down, change)
        assert alpha == len(down) == 2


@pytest.mark.parametrize("patterns", [
    {}, {"rank_pattern": {"b": 4}}, {"rank_pattern": {"b": 4}, "alpha_pattern": {"a": 7}}])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}])
def test_a_written_adapter_has_its_scale_in_its_weights(patterns, options, tmp_path):
    """For each layer alpha is the rank, whatever ranks, alphas and form it had."""
    module = torch.nn.ModuleDict({name: torch.nn.Linear(6, 6) for name in "ab"})
    adapters.add(module, LoraConfig(r=2, lora_alpha=5, target_modules=["a", "b"], init_lora_weights=False, **options,
                                    **patterns), "default")
    adapters.save(module, tmp_path)
    said, weights = json.loads((tmp_path / adapters.CONFIG).read_text()), load_file(tmp_path / adapters.WEIGHTS)
    assert said["lora_alpha"] == said["r"] == 2 and not said["use_rslora"]
    assert said["alpha_pattern"] == said["rank_pattern"] == patterns.get("rank_pattern", {})
    other = torch.nn.ModuleDict({name: torch.nn.Linear(6, 6) for name in "ab"})
    adapters.load(other, tmp_path)
    for key, layer in lora_layers(module).items():
        change = weights[f"{key}.lora_B.weight"] @ weights[f"{key}.lora_A.weight"]
        torch.testing.assert_close(change, layer.get_delta_weight("default"))
        torch.testing.assert_close(other[key].get_delta_weight("default"), change)


@pytest.mark.parametrize("name", ["transformer", "text_encoder", "text_encoder_2"])
def test_a_module_is_as_before_when_its_adapter_is_removed(name):
    module = getattr(tiny.flux(), name)
    before, kinds = {**module.state_dict()}, [type(part) for part in module.modules()]
    targets = [key for key, part in module.named_modules() if isinstance(part, torch.nn.Linear)][:2]
    for first in ("default", "other"):
        adapters.add(module, LoraConfig(r=2, target_modules=targets), first)
        assert len(lora_layers(module)) == 2 and [*adapters.adapter_configs(module)] == [first]
        adapters.delete(module, first)
        after = module.state_dict()
        assert after.keys() == before.keys() and all(torch.equal(after[key], value) for key, value in before.items())
        assert [type(part) for part in module.modules()] == kinds and not adapters.adapter_configs(module)
        assert not getattr(module, "_hf_peft_config_loaded", False)


def test_one_adapter_of_two_is_deleted():
    module = tiny.flux().transformer
    [target] = [key for key, part in module.named_modules() if isinstance(part, torch.nn.Linear)][:1]
    for name in ("one", "two"):
        adapters.add(module, LoraConfig(r=2, target_modules=[target]), name)
    adapters.delete(module, "two")
    adapters.delete(module, "two")
    assert [*adapters.adapter_configs(module)] == ["one"] and [*lora_layers(module)[target].lora_A] == ["one"]


@pytest.mark.parametrize("change, told", [
    (lambda tensors: tensors.pop(next(iter(tensors))), "has no .*lora_A"),
    (lambda tensors: tensors.update({f"{adapters.WRAPPED}model.other.lora_A.weight": torch.zeros(2, 2)}),
     "has .*other.lora_A"),
    (lambda tensors: tensors.update({key: value[:1].contiguous() for key, value in tensors.items()}),
     "does not load into Qwen3ForCausalLM: .*size mismatch")])
def test_a_file_of_another_model_is_told(change, told, tmp_path):
    tensors = load_file(EARLIER / "language" / adapters.WEIGHTS)
    change(tensors)
    shutil.copy(EARLIER / "language" / adapters.CONFIG, tmp_path)
    save_file(tensors, tmp_path / adapters.WEIGHTS)
    assert re.search(told, message(text_weights.attach, tiny_text.model()[0], tmp_path))
