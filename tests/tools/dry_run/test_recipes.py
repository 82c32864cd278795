"""Dry runs of every packaged recipe, with few blocks and small images: no tensor meets one of another device."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowgrpo import published
from flowgrpo.config import load
from flowgrpo.tools.dry_run import from_configs
from flowgrpo.tools.dry_run.estimate import dry_run

CONFIGS = Path(__file__).parents[3] / "configs"
TEXT = {"num_hidden_layers": 2}
SHALLOW = {
    "SD3Transformer2DModel": {"num_layers": 2, "dual_attention_layers": (0,)},
    "ChromaTransformer2DModel": {"num_layers": 2, "num_single_layers": 2},
    "Krea2Transformer2DModel": {"num_layers": 2},
    "FluxTransformer2DModel": {"num_layers": 2, "num_single_layers": 2},
    "Flux2Transformer2DModel": {"num_layers": 1, "num_single_layers": 2},
    "HunyuanVideoTransformer3DModel": {"num_layers": 2, "num_single_layers": 2},
    "HunyuanVideo15Transformer3DModel": {"num_layers": 2}, "LTX2VideoTransformer3DModel": {"num_layers": 2},
    "QwenImageTransformer2DModel": {"num_layers": 2}, "SanaTransformer2DModel": {"num_layers": 2},
    "WanTransformer3DModel": {"num_layers": 2}, "ZImageTransformer2DModel": {"n_layers": 2, "n_refiner_layers": 1},
    "UNet2DConditionModel": {"layers_per_block": 1, "transformer_layers_per_block": 1},
    "T5EncoderModel": {"num_layers": 2}, "UMT5EncoderModel": {"num_layers": 2}, "CLIPTextModel": TEXT,
    "CLIPTextModelWithProjection": TEXT, "LlamaModel": {"num_hidden_layers": 3}, "Gemma2Model": TEXT,
    "Qwen3Model": TEXT, "Qwen2_5_VLTextModel": {"num_hidden_layers": 4}}
SMALL = {"train.prompts": "2", "image.height": "128", "image.width": "128"}
CLIPS = {"image.frames": "5", "memory.vae": "whole"}
RECIPES = {file.stem: load(file) for file in sorted(CONFIGS.glob("*.yaml")) if load(file).model in published.MODELS}


def settings_of_memory(name: str) -> int:
    return len(RECIPES[name].memory.model_dump(exclude_defaults=True))


def classes(name: str) -> tuple[str, ...]:
    """Return the classes of a recipe's pipeline and of its parts."""
    model = published.MODELS[RECIPES[name].model]
    return model.pipeline, *sorted(kind for kind, _ in model.parts.values())


# One recipe of each pipeline, the one with the most settings of memory: the others repeat what it runs.
RUN = {classes(name): name for name in sorted(RECIPES, key=settings_of_memory)}


def shallow(model: published.Published) -> published.Published:
    """Few blocks of the published widths."""
    return replace(model, parts={name: (kind, config | _fewer(kind, config))
                                 for name, (kind, config) in model.parts.items()})


def _fewer(kind: str, config):
    if kind == "Qwen2_5_VLForConditionalGeneration":
        return {"text_config": config["text_config"] | TEXT, "vision_config": config["vision_config"] | {"depth": 2}}
    return SHALLOW.get(kind, {})


def test_every_recipe_of_a_pipeline_has_its_models_configuration():
    others = ("starter", "qwen3", "smollm2", "janus")
    pipelines = {file.stem for file in CONFIGS.glob("*.yaml") if not file.stem.startswith(others)}
    assert set(RECIPES) == pipelines


@pytest.mark.parametrize("name", sorted(RUN.values()))
def test_a_recipe_runs_through_all_phases(name, monkeypatch):
    recipe = load(CONFIGS / f"{name}.yaml")
    options = SMALL | (CLIPS if recipe.image.frames else {}) | {
        "train.group": "8" if name == "hunyuan_video" else "4", "train.micro_batch": "2", "train.steps": "6"}
    config = load(CONFIGS / f"{name}.yaml", options)
    monkeypatch.setitem(published.MODELS, config.model, shallow(published.MODELS[config.model]))
    counts = dry_run(config)
    assert {"encode", "rollout", "decode", "reward", "update"} <= set(counts.phases)
    assert all(counts.phases[phase].flops > 0 for phase in ("encode", "rollout", "decode", "update"))
    assert counts.phases["update"].flops > counts.phases["rollout"].flops / 4
    # Of diffusers: a pipeline's loop, a model's masks, noise that is drawn on the CPU.
    theirs = ("/pipeline_", "transformers/transformer_", "utils/torch_utils.py")
    reasons = [*counts.step_waits, *counts.replay_waits]
    ours = [reason for reason in reasons if not any(part in reason for part in theirs)]
    assert not counts.step_waits or name.startswith(("wan", "hunyuan_video15", "chroma"))
    memo = "pipelines/conditioning.py"  # the digest of a reference image, which is compared on the host
    pictured = name.startswith(("flux_kontext", "qwen_image_edit", "skyreels_i2v"))
    masked = name.startswith("hunyuan_video15")  # its masks are read once more when blocks are recomputed
    assert masked or all(memo in reason and pictured for reason in ours), ours


def size(part: published.Part) -> float:
    """Billions of weights."""
    return sum(p.numel() for p in from_configs.part(*part, torch.bfloat16).parameters()) / 1e9


def test_published_sizes_are_those_of_the_model_cards():
    denoisers = {"stable-diffusion-v1-5/stable-diffusion-v1-5": 0.86, "stabilityai/stable-diffusion-xl-base-1.0": 2.57,
                 "stabilityai/stable-diffusion-3.5-medium": 2.24, "black-forest-labs/FLUX.1-dev": 11.9,
                 "Qwen/Qwen-Image": 20.4, "Efficient-Large-Model/Sana_1600M_512px_diffusers": 1.6,
                 "Tongyi-MAI/Z-Image-Turbo": 6.15, "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 1.42,
                 "Wan-AI/Wan2.1-T2V-14B-Diffusers": 14.3, "hunyuanvideo-community/HunyuanVideo": 12.8}
    for model, billions in denoisers.items():
        parts = published.MODELS[model].parts
        assert size(parts.get("transformer") or parts["unet"]) == pytest.approx(billions, rel=0.01), model
    encoders = {"T5_XXL": 4.76, "UMT5_XXL": 5.68, "CLIP_L": 0.123, "CLIP_G": 0.695, "QWEN_VL_7B": 8.29,
                "QWEN3_4B": 4.02, "LLAMA3_8B": 7.5, "GEMMA2_2B": 2.61}
    for name, billions in encoders.items():
        assert size(getattr(published, name)) == pytest.approx(billions, rel=0.01), name
