"""Names that ComfyUI uses for the layers that diffusers trains, by the class of the denoiser.

The names are those its loader knows (comfy/lora.py, `model_lora_keys_unet` and `model_lora_keys_clip`). ComfyUI reads a
file with other names and changes nothing, so a denoiser that is not in the table is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from flowgrpo.errors import UserError
from flowgrpo.starter import FOLDERS

# After a prefix that ends with an underscore, dots become underscores.
FLAT, DIFFUSERS, NATIVE = "lora_transformer_", "transformer.", "diffusion_model."
DENOISERS = {
    "UNet2DConditionModel": "lora_unet_",
    "SD3Transformer2DModel": FLAT, "FluxTransformer2DModel": FLAT, "Flux2Transformer2DModel": FLAT,
    "ChromaTransformer2DModel": FLAT,
    "PixArtTransformer2DModel": DIFFUSERS, "AuraFlowTransformer2DModel": DIFFUSERS,
    "QwenImageTransformer2DModel": NATIVE, "ZImageTransformer2DModel": NATIVE, "LTXVideoTransformer3DModel": NATIVE,
    "WanTransformer3DModel": NATIVE,
}
# Wan's layer names in its original code; ComfyUI keeps them.
WAN = {"attn1.to_q": "self_attn.q", "attn1.to_k": "self_attn.k", "attn1.to_v": "self_attn.v",
       "attn1.to_out.0": "self_attn.o", "attn2.to_q": "cross_attn.q", "attn2.to_k": "cross_attn.k",
       "attn2.to_v": "cross_attn.v", "attn2.to_out.0": "cross_attn.o", "attn2.add_k_proj": "cross_attn.k_img",
       "attn2.add_v_proj": "cross_attn.v_img", "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}
CLIP = {"CLIPTextModel", "CLIPTextModelWithProjection"}
ENCODERS = {"UNet2DConditionModel": CLIP, "SD3Transformer2DModel": CLIP | {"T5EncoderModel"},
            "FluxTransformer2DModel": CLIP | {"T5EncoderModel"}}
PLACES = {"text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_", "text_encoder_3": "lora_te3_"}


def classes(model: str) -> dict[str, str]:
    """Return the classes of a pipeline's parts, from its index.
    model: a starter's name, a directory, a hub id, or the name of a pipeline class.
    Raises UserError if it has no index."""
    import diffusers

    if model.isidentifier() and model not in FOLDERS and not Path(model).exists() and hasattr(diffusers, model):
        taken = getattr(diffusers, model).__init__.__annotations__
        return {name: getattr(cls, "__name__", str(cls).partition(" |")[0].rpartition(".")[2])
                for name, cls in taken.items()}
    try:
        index = diffusers.DiffusionPipeline.load_config(FOLDERS.get(model, model))
    except Exception as error:  # the hub or third-party files can raise anything
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"the parts of the model {model!r} cannot be read ({first}): expected a directory with a "
                        "model_index.json, or a hub id that can be reached") from None
    return {name: str(value[1]) for name, value in index.items() if isinstance(value, list)}


def namer(part: str, known: dict[str, str]) -> Callable[[str], str]:
    """Return the function from a diffusers layer name to ComfyUI's, for the part `part`. known: result of `classes`.
    Raises UserError for a part that has no ComfyUI names."""
    denoiser = known.get("unet", known.get("transformer", ""))
    cls = known.get(part, "")
    if cls in DENOISERS and part not in PLACES:
        return lambda layer: _joined(DENOISERS[cls], _wan(layer) if cls == "WanTransformer3DModel" else layer)
    if part in PLACES and cls in ENCODERS.get(denoiser, ()):
        return lambda layer: _joined(PLACES[part], _clip(layer) if cls in CLIP else layer)
    raise UserError(f"ComfyUI has no name for the {part} ({cls or 'of an unknown class'}): expected a denoiser among "
                    f"{', '.join(DENOISERS)}, and text encoders only of the first of them; use --form merged, or load "
                    "the run's own pytorch_lora_weights.safetensors with diffusers")


def _joined(prefix: str, layer: str) -> str:
    return prefix + (layer.replace(".", "_") if prefix.endswith("_") else layer)


def _clip(layer: str) -> str:
    """Add the name of the inner model, which some versions of transformers omit."""
    return layer if layer.startswith("text_model.") else f"text_model.{layer}"


def _wan(layer: str) -> str:
    block = re.fullmatch(r"(blocks\.\d+\.)(.+)", layer)
    if block is None or block[2] not in WAN:
        raise UserError(f"ComfyUI's name for Wan's layer {layer} is not known: expected {', '.join(WAN)}; use --form "
                        "merged, or train without it in adapter.targets")
    return block[1] + WAN[block[2]]
