"""Names that other programs use for the layers that diffusers trains, by the class of the denoiser.

ComfyUI's are those that its loader maps (comfy/lora.py, `model_lora_keys_unet` and `model_lora_keys_clip`); kohya's are
the modules of its scripts (networks/lora*.py): the layers of the model's original code. A program reads a file with
other names and changes nothing, so what is not in a table is refused.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowgrpo.errors import UserError
from flowgrpo.starter import FOLDERS

Program = Literal["comfyui", "kohya"]
# After a prefix that ends with an underscore, dots become underscores.
UNET, FLAT, DIFFUSERS, NATIVE = "lora_unet_", "lora_transformer_", "transformer.", "diffusion_model."


@dataclass(frozen=True)
class Place:
    """Layer of another program's file. part: of a fused one, such as "q" of `parts` "qkv"; empty for a whole one."""

    name: str
    part: str = ""
    parts: str = ""


@dataclass(frozen=True)
class Family:
    """Names of a class of denoisers.

    prefix: of diffusers' names in a file for ComfyUI; empty where it reads the original names alone. own: ComfyUI maps
    the names of the file of `load_lora_weights`. native: expressions for diffusers' names and the original ones, where
    `|q` ends a part of a fused layer. kohya: its scripts have the class.
    """

    prefix: str = ""
    own: bool = False
    native: tuple[tuple[str, str], ...] = ()
    kohya: bool = False

    def place(self, cls: str, layer: str) -> Place:
        """Layer's place among the original names. Raises UserError for one without a name."""
        for pattern, replacement in self.native:
            if re.fullmatch(pattern, layer):
                name, _, part = re.sub(pattern, replacement, layer).partition("|")
                return Place(name, part, next(parts for end, parts in FUSED.items() if name.endswith(end)) if part
                             else "")
        raise UserError(f"the original name of the layer {layer} of {cls} is not known: use --form merged, or train "
                        "without it in adapter.targets")


FUSED = {"kv_proj": "kv", "linear1": "qkvm", "qkv": "qkv", "qkv_x": "qkv", "qkv_y": "qkv"}  # parts by the name's end


def rules(start: str, to: str, names: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Expressions for diffusers' names that begin with `start`, and the original ones, which begin with `to`."""
    return tuple((start + pattern, to + name) for pattern, name in names.items())


def joint(blocks: str, first: str, second: str, up: str, down: str, first_mlp: str, second_mlp: str
          ) -> tuple[tuple[str, str], ...]:
    """Rules of blocks with two streams of fused attention. up, down: layers of an MLP."""
    return rules(r"transformer_blocks\.(\d+)\.", rf"{blocks}.\1.", {
        r"attn\.to_([qkv])": first + r".qkv|\2", r"attn\.add_([qkv])_proj": second + r".qkv|\2",
        r"attn\.to_out\.0": first + ".proj", r"attn\.to_add_out": second + ".proj",
        r"ff\.net\.0\.proj": first_mlp + up, r"ff\.net\.2": first_mlp + down,
        r"ff_context\.net\.0\.proj": second_mlp + up, r"ff_context\.net\.2": second_mlp + down})


DOUBLE = joint("double_blocks", "img_attn", "txt_attn", ".0", ".2", "img_mlp", "txt_mlp")
SINGLE = rules(r"single_transformer_blocks\.(\d+)\.", r"single_blocks.\1.", {
    r"attn\.to_([qkv])": r"linear1|\2", "proj_mlp": "linear1|m", "proj_out": "linear2"})
REFINER = rules(
    r"context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.", r"txt_in.individual_token_refiner.blocks.\1.", {
        r"attn\.to_([qkv])": r"self_attn.qkv|\2", r"attn\.to_out\.0": "self_attn.proj",
        r"ff\.net\.0\.proj": "mlp.0", r"ff\.net\.2": "mlp.2"})
SD3 = joint("joint_blocks", "x_block.attn", "context_block.attn", ".fc1", ".fc2", "x_block.mlp", "context_block.mlp"
            ) + rules(r"transformer_blocks\.(\d+)\.attn2\.", r"joint_blocks.\1.x_block.attn2.", {
                r"to_([qkv])": r"qkv|\2", r"to_out\.0": "proj"})
WAN = rules(r"(blocks|vace_blocks)\.(\d+)\.", r"\1.\2.", {
    r"attn1\.to_([qkv])": r"self_attn.\3", r"attn1\.to_out\.0": "self_attn.o",
    r"attn2\.to_([qkv])": r"cross_attn.\3", r"attn2\.to_out\.0": "cross_attn.o",
    r"attn2\.add_([kv])_proj": r"cross_attn.\3_img", r"ffn\.net\.0\.proj": "ffn.0", r"ffn\.net\.2": "ffn.2",
    "proj_in": "before_proj", "proj_out": "after_proj"})
LUMINA = rules(r"(layers|noise_refiner|context_refiner)\.(\d+)\.", r"\1.\2.", {
    r"attn\.to_([qkv])": r"attention.qkv|\3", r"attn\.to_out\.0": "attention.out",
    r"feed_forward\.linear_([123])": r"feed_forward.w\3"})
HUNYUAN_DIT = rules(r"blocks\.(\d+)\.", r"blocks.\1.", {
    r"attn1\.to_([qkv])": r"attn1.Wqkv|\2", r"attn2\.to_q": "attn2.q_proj", r"attn2\.to_([kv])": r"attn2.kv_proj|\2",
    r"(attn[12])\.to_out\.0": r"\2.out_proj", r"ff\.net\.0\.proj": "mlp.fc1", r"ff\.net\.2": "mlp.fc2",
    "skip_linear": "skip_linear"})
MOCHI = rules(r"transformer_blocks\.(\d+)\.", r"blocks.\1.", {
    r"attn1\.to_([qkv])": r"attn.qkv_x|\2", r"attn1\.add_([qkv])_proj": r"attn.qkv_y|\2",
    r"attn1\.to_out\.0": "attn.proj_x", r"attn1\.to_add_out": "attn.proj_y", r"ff\.net\.2": "mlp_x.w2",
    r"ff_context\.net\.2": "mlp_y.w2"}) + rules(r"time_embed\.pooler\.", "t5_y_embedder.", {
        "(to_q|to_kv|to_out)": r"\1"})
COSMOS = rules(r"transformer_blocks\.(\d+)\.", r"blocks.\1.", {
    r"attn1\.to_([qkv])": r"self_attn.\2_proj", r"attn1\.to_out\.0": "self_attn.output_proj",
    r"attn2\.to_([qkv])": r"cross_attn.\2_proj", r"attn2\.to_out\.0": "cross_attn.output_proj",
    r"ff\.net\.0\.proj": "mlp.layer1", r"ff\.net\.2": "mlp.layer2"})
LTX = ((r"(transformer_blocks\.\d+\.(?:(?:audio_)?(?:attn[12]|ff)|audio_to_video_attn|video_to_audio_attn)\..+)",
        r"\1"),)
FAMILIES = {
    "UNet2DConditionModel": Family(UNET, kohya=True),
    "SD3Transformer2DModel": Family(FLAT, own=True, native=SD3, kohya=True),
    "FluxTransformer2DModel": Family(FLAT, own=True, native=DOUBLE + SINGLE, kohya=True),
    "ChromaTransformer2DModel": Family(FLAT, own=True, native=DOUBLE + SINGLE, kohya=True),
    "Flux2Transformer2DModel": Family(FLAT, own=True),
    "PixArtTransformer2DModel": Family(DIFFUSERS),
    "AuraFlowTransformer2DModel": Family(DIFFUSERS, own=True),
    "QwenImageTransformer2DModel": Family(NATIVE, own=True), "ZImageTransformer2DModel": Family(NATIVE, own=True),
    "Krea2Transformer2DModel": Family(DIFFUSERS, own=True), "ErnieImageTransformer2DModel": Family(DIFFUSERS, own=True),
    "HiDreamImageTransformer2DModel": Family(DIFFUSERS, own=True),
    "QwenImage21Transformer2DModel": Family(DIFFUSERS, own=True),
    "Lumina2Transformer2DModel": Family(native=LUMINA, kohya=True),
    "LTXVideoTransformer3DModel": Family(native=LTX), "LTX2VideoTransformer3DModel": Family(native=LTX),
    "WanTransformer3DModel": Family(native=WAN), "WanVACETransformer3DModel": Family(native=WAN),
    "SkyReelsV2Transformer3DModel": Family(native=WAN),
    "HunyuanVideoTransformer3DModel": Family(native=DOUBLE + SINGLE + REFINER),
    "HunyuanVideo15Transformer3DModel": Family(native=DOUBLE + REFINER),
    "CosmosTransformer3DModel": Family(native=COSMOS),
    "HunyuanDiT2DModel": Family(native=HUNYUAN_DIT), "MochiTransformer3DModel": Family(native=MOCHI),
}
CLIP, T5 = {"CLIPTextModel", "CLIPTextModelWithProjection"}, {"T5EncoderModel"}
ENCODERS = {"UNet2DConditionModel": CLIP, "SD3Transformer2DModel": CLIP | T5, "FluxTransformer2DModel": CLIP | T5}
PLACES = {"text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_", "text_encoder_3": "lora_te3_"}


def classes(model: str, revision: str | None = None) -> dict[str, str]:
    """Classes of a pipeline's parts, from its index.
    model: a starter's name, a directory, a hub id, or the name of a pipeline class. revision: on the hub.
    Raises UserError if it has no index."""
    import diffusers

    if model.isidentifier() and model not in FOLDERS and not Path(model).exists() and hasattr(diffusers, model):
        taken = getattr(diffusers, model).__init__.__annotations__
        return {name: getattr(cls, "__name__", str(cls).partition(" |")[0].rpartition(".")[2])
                for name, cls in taken.items()}
    from flowgrpo.policies.pipelines.load import read_index

    try:
        index = read_index(str(FOLDERS.get(model, model)), revision)
    except Exception as error:  # the hub or third-party files can raise anything
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"the parts of the model {model!r} cannot be read ({first}): expected a directory with a "
                        "model_index.json, or a hub id that can be reached") from None
    return {name: str(value[1]) for name, value in index.items() if isinstance(value, list) and value[1]}


def namer(part: str, known: dict[str, str], program: Program = "comfyui") -> Callable[[str], Place]:
    """Function from a diffusers layer name to a program's, for the part `part`. known: result of `classes`.
    Raises UserError for a part that the program has no names for."""
    denoiser = known.get("unet", known.get("transformer", ""))
    cls, family = known.get(part, ""), FAMILIES.get(known.get(part, ""))
    if family and part not in PLACES and (program == "comfyui" or family.kohya):
        if program == "comfyui" and family.prefix:
            return lambda layer: Place(_join_layer(family.prefix, layer))
        if not family.native:
            return lambda layer: Place(_join_layer(UNET, layer))
        prefix = NATIVE if program == "comfyui" else UNET

        def native(layer: str) -> Place:
            place = family.place(cls, layer)
            return Place(_join_layer(prefix, place.name), place.part, place.parts)

        return native
    if part in PLACES and cls in ENCODERS.get(denoiser, ()):
        start = PLACES[part]
        if program == "kohya":  # whose scripts have other names for the T5 of FLUX and the CLIP of SD 1.5
            alone = "unet" in known and "text_encoder_2" not in known
            start = "lora_te3_" if cls in T5 else "lora_te_" if alone else start
        inner = "text_model." if cls in CLIP else ""  # the inner model's name, which some versions of transformers omit
        return lambda layer: Place(_join_layer(start, inner + layer.removeprefix(inner)))
    has = "ComfyUI has" if program == "comfyui" else "the scripts of kohya have"
    raise UserError(f"{has} no name for the {part} ({cls or 'of an unknown class'}): use --form merged, or load the "
                    "run's own file with diffusers")


def _join_layer(prefix: str, layer: str) -> str:
    return prefix + (layer.replace(".", "_") if prefix.endswith("_") else layer)
