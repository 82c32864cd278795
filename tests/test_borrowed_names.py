"""Names from the inside of diffusers, transformers, peft and accelerate that the package uses: each still exists.

A public name is one that the library's top level exports. All others may go in any release; then the test of that name
fails, and says where it is used.
"""

import ast
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flowgrpo"
LIBRARIES = {"diffusers", "transformers", "peft", "accelerate"}

# Module and name, as `from MODULE import NAME`.
IMPORTED = [
    ("accelerate.commands.accelerate_cli", "main"),
    ("accelerate.utils", "broadcast_object_list"),
    ("accelerate.utils", "set_seed"),
    ("diffusers.image_processor", "VaeImageProcessor"),
    ("diffusers.loaders.single_file_utils", "fetch_diffusers_config"),
    ("diffusers.loaders.single_file_utils", "is_clip_model_in_single_file"),
    ("diffusers.loaders.single_file_utils", "is_t5_in_single_file"),
    ("diffusers.models.attention_dispatch", "attention_backend"),
    ("diffusers.models.autoencoders.vae", "DiagonalGaussianDistribution"),
    ("diffusers.models.normalization", "MochiRMSNorm"),
    ("diffusers.models.normalization", "RMSNorm"),
    ("diffusers.pipelines.kolors.pipeline_kolors", "KolorsPipeline"),
    ("diffusers.pipelines.kolors.text_encoder", "ChatGLMConfig"),
    ("diffusers.pipelines.kolors.text_encoder", "ChatGLMModel"),
    ("diffusers.pipelines.kolors.tokenizer", "ChatGLMTokenizer"),
    ("diffusers.pipelines.ltx2", "LTX2TextConnectors"),
    ("diffusers.pipelines.ltx2.vocoder", "LTX2Vocoder"),
    ("diffusers.utils", "logging"),
    ("diffusers.utils.torch_utils", "randn_tensor"),
    ("peft.functional", "delete_adapter"),
    ("peft.functional", "get_peft_model_state_dict"),
    ("peft.functional", "inject_adapter_in_model"),
    ("peft.functional", "set_peft_model_state_dict"),
    ("peft.tuners.lora", "LoraLayer"),
    ("peft.tuners.tuners_utils", "BaseTunerLayer"),
    ("peft.utils.other", "get_pattern_key"),
    ("transformers.modeling_layers", "GradientCheckpointingLayer"),
    ("transformers.models.auto", "modeling_auto"),
    ("transformers.models.blip.modeling_blip", "BlipVisionModel"),
    ("transformers.models.blip.modeling_blip_text", "BlipTextModel"),
    ("transformers.models.qwen2_vl.image_processing_qwen2_vl", "smart_resize"),
    ("transformers.utils", "logging")]

# Class, attribute of it or of its instances, and the file that reads it.
ATTRIBUTES = [
    ("diffusers.models.transformers.transformer_flux:FluxAttnProcessor", "_attention_backend",
     "policies/pipelines/attention.py"),
    ("diffusers:DiffusionPipeline", "_execution_device", "policies/pipelines/call.py"),
    ("diffusers:FluxPipeline", "_lora_loadable_modules", "policies/weights/lora_files.py"),
    ("diffusers:FluxPipeline", "_pack_latents", "policies/pipelines/image_latents.py"),
    ("diffusers:FluxTransformer2DModel", "_cp_plan", "policies/pipelines/attention.py"),
    ("diffusers:FluxTransformer2DModel", "_hf_peft_config_loaded", "policies/weights/adapters.py"),
    ("diffusers:FluxTransformer2DModel", "_keep_in_fp32_modules", "tools/dry_run/from_configs.py"),
    ("diffusers:FluxTransformer2DModel", "_supports_gradient_checkpointing", "policies/weights/checkpointing.py"),
    ("transformers:PreTrainedModel", "_from_config", "tools/dry_run/from_configs.py"),
    ("transformers:PreTrainedModel", "_hf_peft_config_loaded", "policies/weights/adapters.py"),
    ("transformers:PreTrainedModel", "_keep_in_fp32_modules", "tools/dry_run/from_configs.py")]

FORBIDDEN = {"add_adapter", "set_adapter", "disable_adapters", "enable_adapters", "active_adapters",
             "get_adapter_state_dict", "delete_adapter"}  # of transformers, whose minimum of peft moves by itself


def trees():
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(PACKAGE.rglob("*.py"))}


def borrowed() -> dict[tuple[str, str], str]:
    """The names that the package imports from below a library's top level, with a file that does so."""
    found = {}
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and "." in (node.module or "") and \
                    node.module.partition(".")[0] in LIBRARIES:
                found |= {(node.module, alias.name): str(file.relative_to(PACKAGE)) for alias in node.names}
            if isinstance(node, ast.Import):
                found |= {(alias.name, ""): str(file.relative_to(PACKAGE)) for alias in node.names
                          if "." in alias.name and alias.name.partition(".")[0] in LIBRARIES}
    return found


def test_the_list_is_complete():
    assert sorted(borrowed()) == sorted(IMPORTED)


@pytest.mark.parametrize("module, name", IMPORTED, ids=lambda each: each)
def test_a_borrowed_name_exists(module, name):
    there = hasattr(importlib.import_module(module), name)
    assert there, f"{module} has no {name} any more: flowgrpo/{borrowed()[module, name]} uses it"


@pytest.mark.parametrize("owner, name, file", ATTRIBUTES)
def test_a_borrowed_attribute_exists(owner, name, file):
    library, _, kind = owner.partition(":")
    assert name in (PACKAGE / file).read_text(encoding="utf-8"), f"{file} uses {name} no more: leave it out here"
    assert hasattr(getattr(importlib.import_module(library), kind), name), f"{owner} has no {name}: {file} uses it"


def test_no_method_of_transformers_touches_an_adapter():
    """`enable_adapters` and `set_adapter` of peft's own layers are called with the layer."""
    for file, tree in trees().items():
        called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call)
                  and isinstance(node.func, ast.Attribute)
                  and not (isinstance(node.func.value, ast.Name) and node.func.value.id == "layer")}
        assert not called & FORBIDDEN, f"{file}: {called & FORBIDDEN}"
