"""Load the LoRA files of tiny models of every family by the loaders of other programs, and compare what they add.

    python scripts/measure/lora_loaders.py --comfyui DIR --kohya DIR --ai-toolkit DIR --sglang DIR [--family NAME ...]

DIR: clones of ComfyUI, kohya's sd-scripts and ai-toolkit, and a folder with the package sglang. `--python` names an
interpreter that has their requirements; `--names tests/export/names.json` writes the layers' names for the tests.
Prints the commit of each, of a folder without git that in DIR.commit, and a Markdown table: per family and program, for
the run's own file and its exports, how many keys are unmatched and the change relative to peft's (1: the same).

Sizes are tiny and weights random (seed 0). ComfyUI's layers are those of its own classes; which part of a fused layer a
layer of diffusers is comes from ComfyUI's own maps, or from the converters of diffusers.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PIPELINES = {
    "SD 1.5": "StableDiffusionPipeline", "SDXL": "StableDiffusionXLPipeline", "SD 3": "StableDiffusion3Pipeline",
    "FLUX": "FluxPipeline", "FLUX.2": "Flux2Pipeline", "Chroma": "ChromaPipeline", "AuraFlow": "AuraFlowPipeline",
    "PixArt-Sigma": "PixArtSigmaPipeline", "Qwen-Image": "QwenImagePipeline", "Z-Image": "ZImagePipeline",
    "Lumina 2": "Lumina2Pipeline", "HiDream": "HiDreamImagePipeline", "Krea 2": "Krea2Pipeline",
    "Ernie-Image": "ErnieImagePipeline", "HunyuanDiT": "HunyuanDiTPipeline", "Wan": "WanPipeline",
    "Wan 2.2": "WanPipeline (2.2)", "Wan I2V": "WanImageToVideoPipeline", "Wan-VACE": "WanVACEPipeline",
    "SkyReels-V2": "SkyReelsV2Pipeline", "HunyuanVideo": "HunyuanVideoPipeline",
    "HunyuanVideo 1.5": "HunyuanVideo15Pipeline", "LTX-Video": "LTXPipeline", "LTX-2": "LTX2Pipeline",
    "Mochi": "MochiPipeline"}
OWN, COMFYUI, KOHYA = "own", "comfyui", "kohya"
FORMS = (OWN, COMFYUI, KOHYA)
Change = dict[str, torch.Tensor]  # by layer


# --- files -----------------------------------------------------------------------------------------------------------

def write_case(name: str, folder: Path) -> dict[str, Any]:
    """Write a tiny pipeline's LoRA, its exports and what its layers add; return the case's facts."""
    from flowgrpo.config import validate
    from flowgrpo.config.sections import Adapter
    from flowgrpo.errors import UserError
    from flowgrpo.export import export
    from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
    from flowgrpo.policies.weights.trainable import lora_layers
    from flowgrpo.tools.check.tiny import make

    torch.manual_seed(0)
    pipe, call = make(name)
    policy = PipelinePolicy(pipe, Adapter(rank=2, alpha=3.0), call=call)
    with torch.no_grad():
        for parameter in policy.weights.parameters():
            parameter.copy_(torch.randn_like(parameter))
    policy.weights.save(folder)
    (folder / "config.yaml").write_text(validate({"model": type(pipe).__name__, "reward": "bright"}).yaml())
    part, module = next(iter(policy.weights.modules.items()))
    change = {key: layer.get_delta_weight("default").detach().contiguous()
              for key, layer in lora_layers(module).items()}
    save_file(change, folder / "change.safetensors")
    shapes = {key.replace(".base_layer", ""): list(value.shape) for key, value in module.state_dict().items()
              if "lora_" not in key}
    own = folder / "pytorch_lora_weights.safetensors"
    files, refused = {OWN: str(own if own.is_file() else folder / part / "adapter_model.safetensors")}, {}
    for form in (COMFYUI, KOHYA):
        try:
            files[form] = str(export.lora(folder, folder / f"{form}.safetensors", form)[0])
        except UserError as error:
            refused[form] = str(error)
    config = {key: value for key, value in dict(module.config).items()
              if isinstance(value, int | float | str | list | tuple)}
    facts = {"pipeline": name, "part": part, "class": type(module).__name__, "shapes": shapes, "files": files,
             "refused": refused, "config": config, "folder": str(folder)}
    (folder / "facts.json").write_text(json.dumps(facts))
    return facts


def result(expected: Change, found: Change, keys: int, unmatched: int) -> dict[str, Any]:
    """Return how many keys did nothing, and the least and greatest change relative to the expected one."""
    ratios = [round(((found[key] * value).sum() / (value * value).sum()).item(), 3) if key in found else 0.0
              for key, value in expected.items()]
    off = [found[key] - value for key, value in expected.items() if key in found]
    exact = bool(off) and max(part.abs().max().item() for part in off) < 1e-4
    return {"keys": keys, "unmatched": unmatched, "least": min(ratios), "most": max(ratios), "exact": exact}


# --- diffusers, peft, SGLang -----------------------------------------------------------------------------------------

def by_diffusers(facts: dict[str, Any], file: Path, _: None) -> dict[str, Any]:
    from flowgrpo.policies.weights.trainable import lora_layers
    from flowgrpo.tools.check.tiny import make

    torch.manual_seed(0)
    pipe, _ = make(facts["pipeline"])
    pipe.load_lora_weights(file.parent, weight_name=file.name, adapter_name="default")
    layers = lora_layers(getattr(pipe, facts["part"]))
    found = {key: layer.get_delta_weight("default").detach().float() for key, layer in layers.items()}
    expected = load_file(Path(facts["folder"]) / "change.safetensors")
    return result(expected, found, len(load_file(file)), 2 * len(set(expected) - set(found)))


def by_peft(facts: dict[str, Any], file: Path, _: None) -> dict[str, Any]:
    """By peft alone, with the configuration that the file has."""
    from peft import LoraConfig
    from peft.functional import inject_adapter_in_model, set_peft_model_state_dict
    from safetensors import safe_open

    from flowgrpo.policies.weights.trainable import lora_layers
    from flowgrpo.tools.check.tiny import make

    pipe, _ = make(facts["pipeline"])
    part, module = facts["part"], getattr(pipe, facts["part"])
    with safe_open(file, "pt") as opened:
        said = json.loads((opened.metadata() or {}).get("lora_adapter_metadata", "{}"))
    said = {key.removeprefix(f"{part}."): value for key, value in said.items() if key.startswith(f"{part}.")} or \
        json.loads(file.with_name("adapter_config.json").read_text())
    inject_adapter_in_model(LoraConfig(r=said["r"], lora_alpha=said["lora_alpha"],
                                       target_modules=said["target_modules"]), module, "default")
    state = {key.removeprefix(f"{part}."): value for key, value in load_file(file).items()}
    told = set_peft_model_state_dict(module, state, "default")
    found = {key: layer.get_delta_weight("default").detach() for key, layer in lora_layers(module).items()}
    return result(load_file(Path(facts["folder"]) / "change.safetensors"), found, len(state), len(told.unexpected_keys))


def by_sglang(facts: dict[str, Any], file: Path, clone: Path) -> dict[str, Any]:
    """By SGLang-Diffusion's reader of adapters; its layers scale by alpha / rank."""
    place = "sglang/multimodal_gen/runtime/pipelines_core/lora/peft_adapter.py"
    spec = importlib.util.spec_from_file_location("peft_adapter", clone / place)
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    alpha = reader.get_peft_lora_alpha(reader.load_peft_config(str(file)))
    tensors, found, part = load_file(file), {}, facts["part"]
    for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
        down, up = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        found[key.removesuffix(".lora_A.weight").removeprefix(f"{part}.")] = up.flatten(1) @ down.flatten(1) * (
            1 if alpha is None else alpha / len(down))
    expected = load_file(Path(facts["folder"]) / "change.safetensors")
    return result({key: value.flatten(1) for key, value in expected.items()}, found, len(tensors),
                  2 * len(set(expected) - set(found)))


# --- ComfyUI ---------------------------------------------------------------------------------------------------------

Where = dict[str, tuple[str, int, int]]  # layer of diffusers: native layer, first row, rows


def mapped(found: dict[str, Any], shapes: dict[str, list[int]]) -> Where:
    """Return the places of ComfyUI's own map, its offsets at the sizes of `shapes`."""
    where = {}
    for key, to in found.items():
        if not key.endswith(".weight") or key not in shapes:
            continue
        target, rows, first = to if isinstance(to, str) else to[0], shapes[key][0], 0
        if not isinstance(to, str) and to[1] is not None:
            first = round(to[1][1] * rows / to[1][2])
        where[key.removesuffix(".weight")] = (target.removesuffix(".weight"), first, rows)
    return where


def converted(convert: Callable[..., Any], names: Iterator[str] | list[str], shapes: dict[str, list[int]],
              big: dict[str, int], spelled: Callable[[str], str] = str) -> Where:
    """Return the places that a converter of diffusers gives the layers of native names.

    big: rows of layers whose names end so, as the converter has them built in. spelled: a native name as it has it.
    """
    numbers = {name: next((rows for end, rows in big.items() if name.endswith(end)), 6) for name in names}
    checkpoint, codes = {}, {}
    for code, (name, rows) in enumerate(numbers.items()):
        codes[code] = name
        checkpoint[f"{spelled(name + '.weight')}"] = torch.arange(rows)[:, None] + code * 2**20
    made = {key: value for key, value in convert(checkpoint).items() if key.endswith(".weight") and key in shapes}
    parts: dict[str, list[tuple[int, str]]] = {}
    for key, value in made.items():
        first = int(value.flatten()[0])
        parts.setdefault(codes[first // 2**20], []).append((first % 2**20, key))
    where = {}
    for name, found in parts.items():
        offset = 0
        for _, key in sorted(found):
            where[key.removesuffix(".weight")] = (name, offset, shapes[key][0])
            offset += shapes[key][0]
    return where


def hunyuan_spelling(name: str) -> str:
    """Return the name in the original code, as ComfyUI's loader has it for LoRAs."""
    for new, old in (("_attn.qkv.", "_attn_qkv."), ("_attn.proj.", "_attn_proj."), ("_mod.lin.", "_mod.linear."),
                     ("mlp.0.", "mlp.fc1."), ("mlp.2.", "mlp.fc2.")):
        name = name.replace(new, old)
    return name


def comfy_model(facts: dict[str, Any]) -> tuple[Any, dict[str, Any], set[str], Where]:
    """Return ComfyUI's class, its configuration of the tiny model, its layers, and the places of diffusers' layers."""
    import comfy.model_base as base
    import comfy.ops
    import comfy.utils
    from diffusers.loaders import single_file_utils as converters

    cls, shapes, config = facts["class"], facts["shapes"], facts["config"]

    def count(blocks: str) -> int:
        return len({key.split(".")[1] for key in shapes if key.startswith(f"{blocks}.")})

    def layers_of(module: str, name: str, **sizes: Any) -> list[str]:
        made = getattr(importlib.import_module(f"comfy.ldm.{module}"), name)
        model = made(device="meta", dtype=torch.float32, operations=comfy.ops.disable_weight_init, **sizes)
        return [key.removesuffix(".weight") for key in model.state_dict() if key.endswith(".weight")]

    def same(names: list[str]) -> Where:
        return {name: (name, 0, shapes[f"{name}.weight"][0]) for name in names if f"{name}.weight" in shapes}

    hidden = config.get("num_attention_heads", 0) * config.get("attention_head_dim", 0)
    if cls == "UNet2DConditionModel":
        blocks, each = len(config["block_out_channels"]), config["layers_per_block"]
        deep = config.get("transformer_layers_per_block", 1)
        deep = [deep] * blocks if isinstance(deep, int) else deep
        depths = [d if "CrossAttn" in kind else 0 for d, kind in zip(deep, config["down_block_types"], strict=True)]
        unet = {"num_res_blocks": [each] * blocks, "channel_mult": [1] * blocks,
                "transformer_depth": [d for d in depths for _ in range(each)],
                "transformer_depth_output": [d for d in depths for _ in range(each + 1)],
                "transformer_depth_middle": deep[-1]}
        where = mapped(comfy.utils.unet_to_diffusers(unet), shapes)
        return base.BaseModel, unet, {name for name, _, _ in where.values()}, where
    maps = {
        "SD3Transformer2DModel": (base.SD3, {"depth": count("transformer_blocks")}, "mmdit"),
        "FluxTransformer2DModel": (base.Flux, {"depth": count("transformer_blocks"), "hidden_size": hidden,
                                               "depth_single_blocks": count("single_transformer_blocks")}, "flux"),
        "AuraFlowTransformer2DModel": (base.AuraFlow, {
            "n_double_layers": count("joint_transformer_blocks"),
            "n_layers": count("joint_transformer_blocks") + count("single_transformer_blocks")}, "auraflow"),
        "PixArtTransformer2DModel": (base.PixArt, {"depth": count("transformer_blocks"), "hidden_size": hidden},
                                     "pixart"),
        "ZImageTransformer2DModel": (base.Lumina2, {"n_layers": count("layers"), "dim": config.get("dim")}, "z_image"),
        "Krea2Transformer2DModel": (base.Krea2, {"layers": count("transformer_blocks")}, "krea2")}
    maps["Flux2Transformer2DModel"] = (base.Flux2, *maps["FluxTransformer2DModel"][1:])
    maps["ChromaTransformer2DModel"] = (base.Chroma, *maps["FluxTransformer2DModel"][1:])
    if cls in maps:
        model, unet, name = maps[cls]
        function = f"{name}_to_diffusers"
        original = getattr(comfy.utils, function)

        def at_these_sizes(sizes: dict[str, Any], output_prefix: str = "") -> dict[str, Any]:
            """The offsets of ComfyUI's map, which assumes the sizes of the published model, at those of this one."""
            found = original(sizes, output_prefix)
            for key, to in found.items():
                if not isinstance(to, str) and to[1] is not None and key in shapes and to[1][2] != shapes[key][0]:
                    rows, (axis, first, assumed) = shapes[key][0], to[1]
                    found[key] = (to[0], (axis, round(first * rows / assumed), rows), *to[2:])
            return found

        setattr(comfy.utils, function, at_these_sizes)
        where = mapped(at_these_sizes(unet), shapes)
        return model, unet, {name for name, _, _ in where.values()}, where
    if cls in ("WanTransformer3DModel", "SkyReelsV2Transformer3DModel", "WanVACETransformer3DModel"):
        vace = cls == "WanVACETransformer3DModel"
        kind = "i2v" if any("add_k_proj" in key for key in shapes) else "t2v"
        names = layers_of("wan.model", "VaceWanModel", num_layers=4, vace_layers=2, vace_in_dim=96) if vace else \
            layers_of("wan.model", "WanModel", num_layers=4, model_type=kind)
        where = converted(converters.convert_wan_transformer_to_diffusers, names, shapes, {})
        return base.WAN21_Vace if vace else base.WAN21, {}, set(names), where
    if cls == "LTXVideoTransformer3DModel":
        names = layers_of("lightricks.model", "LTXVModel", num_layers=2)
        return base.LTXV, {}, set(names), converted(converters.convert_ltx_transformer_checkpoint_to_diffusers, names,
                                                    shapes, {})
    if cls == "LTX2VideoTransformer3DModel":
        names = layers_of("lightricks.av_model", "LTXAVModel", num_layers=2)
        return base.LTXAV, {}, set(names), converted(converters.convert_ltx2_transformer_to_diffusers, names, shapes,
                                                     {})
    if cls == "QwenImageTransformer2DModel":
        names = layers_of("qwen_image.model", "QwenImageTransformer2DModel", num_layers=2)
        return base.QwenImage, {}, set(names), same(names)
    if cls == "ErnieImageTransformer2DModel":
        names = layers_of("ernie.model", "ErnieImageModel", num_layers=2)
        return base.ErnieImage, {}, set(names), converted(
            converters.convert_ernie_image_transformer_checkpoint_to_diffusers, names, shapes, {})
    if cls == "HiDreamImageTransformer2DModel":
        names = layers_of("hidream.model", "HiDreamImageTransformer2DModel", num_layers=2, num_single_layers=2,
                          patch_size=2, caption_channels=[4096, 4096], llama_layers=[0, 1, 2, 3])
        return base.HiDream, {}, set(names), converted(converters.convert_hidream_transformer_to_diffusers, names,
                                                       shapes, {})
    if cls == "Lumina2Transformer2DModel":
        names = layers_of("lumina.model", "NextDiT", n_layers=2, dim=2304, n_heads=24, n_kv_heads=8, cap_feat_dim=64,
                          qk_norm=True, axes_dims=[32, 32, 32], axes_lens=[300, 512, 512])
        return base.Lumina2, {"n_layers": 2, "dim": 2304}, set(names), converted(
            converters.convert_lumina2_to_diffusers, names, shapes, {"qkv": 3840})
    if cls in ("HunyuanVideoTransformer3DModel", "HunyuanVideo15Transformer3DModel"):
        newer = cls == "HunyuanVideo15Transformer3DModel"
        names = layers_of(
            "hunyuan_video.model", "HunyuanVideo", in_channels=16, out_channels=16, vec_in_dim=None if newer else 768,
            context_in_dim=64, hidden_size=3072, mlp_ratio=4.0, num_heads=24, depth=2, axes_dim=[16, 56, 56],
            depth_single_blocks=0 if newer else 2, theta=256, patch_size=[1, 2, 2], qkv_bias=True,
            guidance_embed=not newer, byt5=newer, meanflow=False, use_cond_type_embedding=newer,
            vision_in_dim=1152 if newer else None, meanflow_sum=False)
        where = converted(converters.convert_hunyuan_video_transformer_to_diffusers, names, shapes,
                          {"linear1": 21504}, hunyuan_spelling)
        return base.HunyuanVideo15 if newer else base.HunyuanVideo, {}, set(names), where
    if cls == "HunyuanDiT2DModel":  # diffusers has no converter of it: the order of the parts is that of ComfyUI's code
        names = layers_of("hydit.models", "HunYuanDiT", depth=4, hidden_size=64, num_heads=4)
        where = {}
        for name in (key.removesuffix(".weight") for key in shapes):
            start, _, end = name.rpartition(".attn")
            fused = {"1.to_q": ("attn1.Wqkv", 0), "1.to_k": ("attn1.Wqkv", 1), "1.to_v": ("attn1.Wqkv", 2),
                     "1.to_out.0": ("attn1.out_proj", 0), "2.to_q": ("attn2.q_proj", 0), "2.to_k": ("attn2.kv_proj", 0),
                     "2.to_v": ("attn2.kv_proj", 1), "2.to_out.0": ("attn2.out_proj", 0)}
            if end in fused:
                rows = shapes[f"{name}.weight"][0]
                where[name] = (f"{start}.{fused[end][0]}", fused[end][1] * rows, rows)
        return base.HunyuanDiT, {}, set(names), where
    if cls == "MochiTransformer3DModel":
        names = layers_of("genmo.joint_model.asymm_models_joint", "AsymmDiTJoint", depth=48, use_t5=True,
                          hidden_size_x=3072, hidden_size_y=1536, num_heads=24, t5_feat_dim=32, qk_norm=True,
                          mlp_ratio_x=4.0, mlp_ratio_y=4.0)
        return base.GenmoMochi, {}, set(names), converted(with_biases(
            converters.convert_mochi_transformer_checkpoint_to_diffusers), names, shapes, {})
    raise ValueError(f"no model of ComfyUI for {cls}")


def with_biases(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return a converter that wants keys besides weights, given weights alone."""
    class Filled(dict):
        def pop(self, key: str, *default: Any) -> Any:
            return super().pop(key, *(default or (torch.zeros(6, 1, dtype=torch.int64),)))

    return lambda checkpoint: convert(Filled(checkpoint))


def native_change(change: Change, where: Where) -> Change:
    """Return a change by native layer."""
    sizes: dict[str, int] = {}
    for name, first, rows in where.values():
        sizes[name] = max(sizes.get(name, 0), first + rows)
    made: Change = {}
    for key, value in change.items():
        if key not in where:
            raise ValueError(f"no native place for {key}")
        name, first, rows = where[key]
        made.setdefault(name, torch.zeros(sizes[name], *value.shape[1:]))[first:first + rows] = value
    return made


def by_comfyui(facts: dict[str, Any], file: Path, _: Path) -> dict[str, Any]:
    import comfy.lora
    import comfy.lora_convert
    import comfy.utils

    base, unet, layers, where = comfy_model(facts)
    expected = native_change(load_file(Path(facts["folder"]) / "change.safetensors"), where)
    save_file(expected, Path(facts["folder"]) / "native.safetensors")
    absent = set(expected) - layers
    weights = {f"diffusion_model.{name}.weight": torch.zeros_like(value) for name, value in expected.items()}
    others = {f"diffusion_model.{name}.weight": torch.zeros(1) for name in layers - set(expected)}
    model = object.__new__(type("Model", (base,), {"state_dict": lambda self: weights | others}))
    object.__setattr__(model, "model_config", SimpleNamespace(unet_config=unet))
    lora = comfy.utils.load_torch_file(str(file), safe_load=True)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        keys = comfy.lora.model_lora_keys_unet(model, {})
        patches = comfy.lora.load_lora(comfy.lora_convert.convert_lora(lora), keys)
    finally:
        logging.getLogger().removeHandler(handler)
    for to, adapter in patches.items():
        key, offset, function = (to, None, None) if isinstance(to, str) else (*to, None)[:3]
        weights[key] = comfy.lora.calculate_weight([(1.0, adapter, 1.0, offset, function)], weights[key].clone(), key)
    found = {key.removeprefix("diffusion_model.").removesuffix(".weight"): value for key, value in weights.items()}
    return result(expected, found, len(lora), sum("not loaded" in line for line in said) + len(absent))


# --- kohya's sd-scripts, ai-toolkit ----------------------------------------------------------------------------------

def kohya_network(facts: dict[str, Any]) -> tuple[Any, Any] | None:
    """Return the network's module and the denoiser of kohya's scripts; None for a family that they lack."""
    cls = facts["class"]
    if cls == "UNet2DConditionModel":
        import networks.lora as network

        from flowgrpo.tools.check.tiny import make

        return network, make(facts["pipeline"])[0].unet
    with torch.device("meta"):
        if cls == "SD3Transformer2DModel":
            import networks.lora_sd3 as network
            from library import sd3_models

            return network, sd3_models.MMDiT(
                input_size=None, pos_embed_max_size=8, patch_size=2, in_channels=16, adm_in_channels=2048, depth=2,
                context_embedder_in_features=64, context_embedder_out_features=128, mlp_ratio=4, qk_norm="rms",
                x_block_self_attn_layers=[0, 1])
        if cls in ("FluxTransformer2DModel", "ChromaTransformer2DModel"):
            import networks.lora_flux as network
            from library import chroma_models, flux_models

            sizes = {"in_channels": 64, "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24,
                     "depth": 2, "depth_single_blocks": 2, "axes_dim": [16, 56, 56], "theta": 10_000, "qkv_bias": True}
            if cls == "FluxTransformer2DModel":
                return network, flux_models.Flux(flux_models.FluxParams(
                    **sizes, vec_in_dim=768, guidance_embed=True))
            return network, chroma_models.Chroma(dataclasses.replace(chroma_models.chroma_params, **sizes))
        if cls == "Lumina2Transformer2DModel":
            import networks.lora_lumina as network
            from library import lumina_models

            return network, lumina_models.NextDiT(dim=64, n_layers=2, n_heads=2, n_kv_heads=1, axes_dims=[8, 12, 12],
                                                  axes_lens=[8, 8, 8], cap_feat_dim=32, qk_norm=True)
    return None


def by_kohya(facts: dict[str, Any], file: Path, _: Path) -> dict[str, Any] | None:
    made = kohya_network(facts)
    if made is None:
        return None
    network, denoiser = made
    folder = Path(facts["folder"])
    expected = load_file(folder / "change.safetensors")
    if facts["class"] != "UNet2DConditionModel":  # the published class, its layers at the sizes of the tiny model
        expected = load_file(folder / "native.safetensors")
        for name, value in expected.items():
            layer = denoiser.get_submodule(name)
            layer.out_features, layer.in_features = value.shape
            layer.weight = torch.nn.Parameter(torch.zeros_like(value))
    state = load_file(file)
    lora, weights = network.create_network_from_weights(1.0, None, None, [torch.nn.Identity()], denoiser,
                                                        weights_sd=dict(state), for_inference=True)
    lora.apply_to([], denoiser, apply_text_encoder=False, apply_unet=True)
    told = lora.load_state_dict(weights, strict=False)
    modules = {layer.lora_name: layer for layer in lora.unet_loras}
    found = {}
    for key in expected:
        if layer := modules.get(f"lora_unet_{key}".replace(".", "_")):
            change = layer.lora_up.weight.flatten(1) @ layer.lora_down.weight.flatten(1) * float(layer.scale)
            found[key] = change.detach().reshape(expected[key].shape)
    return result(expected, found, len(state), len(told.unexpected_keys))


def by_ai_toolkit(facts: dict[str, Any], file: Path, _: Path) -> dict[str, Any]:
    from toolkit.lora_special import LoRASpecialNetwork

    from flowgrpo.tools.check.tiny import make

    module = getattr(make(facts["pipeline"])[0], facts["part"])
    unet = facts["part"] == "unet"
    network = LoRASpecialNetwork([], module, lora_dim=2, alpha=2, train_text_encoder=False, is_transformer=not unet,
                                 target_lin_modules=[facts["class"]])
    network.is_v1 = False
    network.apply_to([], module, False, True)  # which adds the layers to the network
    odd = network.load_weights(str(file)) or {}
    expected = load_file(Path(facts["folder"]) / "change.safetensors")
    modules = {layer.lora_name: layer for layer in network.unet_loras}
    found = {}
    for key in expected:
        name = "lora_unet_" + key.replace(".", "_") if unet else "transformer$$" + key.replace(".", "$$")
        if (layer := modules.get(name)) is not None:
            found[key] = (layer.lora_up.weight @ layer.lora_down.weight * float(layer.scale)).detach()
    return result(expected, found, len(load_file(file)), len(odd))


# --- the table -------------------------------------------------------------------------------------------------------

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "peft": (by_peft, (OWN,)), "diffusers": (by_diffusers, (OWN,)), "ComfyUI": (by_comfyui, FORMS),
    "kohya": (by_kohya, FORMS), "ai-toolkit": (by_ai_toolkit, (OWN, COMFYUI)), "SGLang": (by_sglang, (OWN,))}


def commit(clone: Path) -> str:
    """Return the commit of a clone; of a folder without git that in its .commit, or the version of a package in it."""
    if (clone / ".git").exists():
        return subprocess.check_output(["git", "-C", str(clone), "rev-parse", "HEAD"], text=True).strip()
    noted = clone.with_name(f"{clone.name}.commit")
    versions = [path.name.removesuffix(".dist-info") for path in clone.glob("*.dist-info")]
    return noted.read_text().strip() if noted.is_file() else next(iter(versions), "unknown")


def measured(program: str, clone: Path | None, cases: Path) -> dict[str, Any]:
    """Return the results of a program by family and form; a text for an error."""
    loads, forms = PROGRAMS[program]
    if program in ("ComfyUI", "kohya", "ai-toolkit"):
        sys.path.insert(0, str(clone))
    if program == "ComfyUI":
        sys.argv = ["", "--cpu"]
        import comfy.options

        comfy.options.enable_args_parsing()
    found: dict[str, Any] = {}
    for family in (name for name in PIPELINES if (cases / name).exists()):
        facts = json.loads((cases / family / "facts.json").read_text())
        for form in forms:
            if form not in facts["files"]:
                continue
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    found.setdefault(family, {})[form] = loads(facts, Path(facts["files"][form]), clone)
            except Exception as error:  # other programs' code can raise anything
                told = " ".join(str(error).split())[:160]
                found.setdefault(family, {})[form] = f"{type(error).__name__}: {told}"
    return found


def cell(found: Any) -> str:
    """Return a result as text: the change relative to peft's, and the unmatched keys if there are any."""
    if found is None:
        return "no such model"
    if isinstance(found, str):
        return "does not load"
    change = f"{found['least']:g}" if found["least"] == found["most"] else f"{found['least']:g} to {found['most']:g}"
    if not found["exact"] and found["least"] == found["most"] == 1:
        change += ", not equal"
    return change + (f" ({found['unmatched']} of {found['keys']} keys unmatched)" if found["unmatched"] else "")


def names(cases: Path, results: dict[str, Any]) -> dict[str, dict[str, list[list[Any]]]]:
    """Return the layers of exports that the programs load whole: [layer, rows, columns, rank], by pipeline and form."""
    by = {COMFYUI: ("ComfyUI",), KOHYA: ("ComfyUI", "kohya")}
    found: dict[str, dict[str, list[list[Any]]]] = {}
    for family, name in PIPELINES.items():
        facts = json.loads((cases / family / "facts.json").read_text())
        for form, programs in by.items():
            told = [results.get(program, {}).get(family, {}).get(form) for program in programs]
            if all(isinstance(each, dict) and each["exact"] for each in told):
                layers = load_file(facts["files"][form])
                found.setdefault(name, {})[form] = [
                    [key.removesuffix(".lora_up.weight"), len(up), len(down[0]), len(down)]
                    for key, up in sorted(layers.items()) if key.endswith(".lora_up.weight")
                    for down in (layers[key.replace("lora_up", "lora_down")],)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("comfyui", "kohya", "ai-toolkit", "sglang"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--python", default=sys.executable, help="interpreter with the programs' requirements")
    parser.add_argument("--family", nargs="+", choices=PIPELINES, default=[*PIPELINES], metavar="NAME")
    parser.add_argument("--details", type=Path, help="JSON file for all results")
    parser.add_argument("--names", type=Path, help="JSON file for the layers of the exports that load whole")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    parser.add_argument("--cases", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clones = {"peft": None, "diffusers": None, "ComfyUI": arguments.comfyui, "kohya": arguments.kohya,
              "ai-toolkit": arguments.ai_toolkit, "SGLang": arguments.sglang}
    if arguments.program:
        print(json.dumps(measured(arguments.program, clones[arguments.program], arguments.cases)))
        return
    with tempfile.TemporaryDirectory() as folder:
        cases = Path(folder)
        for family in arguments.family:
            (cases / family).mkdir()
            write_case(PIPELINES[family], cases / family)
        results = {}
        for program, clone in clones.items():
            if clone is None and program not in ("peft", "diffusers"):
                continue
            given = [] if clone is None else [f"--{program.lower()}", str(clone)]
            made = subprocess.run([arguments.python, __file__, "--program", program, "--cases", str(cases), *given],
                                  stdout=subprocess.PIPE, text=True, check=True)
            results[program] = json.loads(made.stdout.splitlines()[-1])
        if arguments.names:
            rows = (f'"{name}": {json.dumps(forms)}' for name, forms in names(cases, results).items())
            arguments.names.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    if arguments.details:
        arguments.details.write_text(json.dumps(results, indent=1))
    for program, clone in clones.items():
        print(f"{program}: {importlib.metadata.version(program) if clone is None else commit(clone)}"
              if program in results else f"{program}: not given")
    columns = [(program, form) for program in results for form in PROGRAMS[program][1]]
    print(f"| family | {' | '.join(f'{program}: {form}' for program, form in columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    for family in arguments.family:
        row = [cell(results[program][family][form]) if form in results[program].get(family, {}) else "-"
               for program, form in columns]
        print(f"| {family} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
