"""ControlNets, IP-Adapters and textual inversions: what a pipeline takes beside its own parts.

All stay frozen; what is trained is the denoiser's LoRA.
"""

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Inversion, IPAdapter
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.files import tensors_of
from flowgrpo.nouns import quantity
from flowgrpo.policies import sources
from flowgrpo.policies.pipelines import modular, prompt_inputs
from flowgrpo.policies.weights.lora_files import tell
from flowgrpo.starter import FOLDERS

WIDTHS = ("cross_attention_dim", "joint_attention_dim")  # of a denoiser and its ControlNet alike
SIDES = {"clip_l": "text_encoder", "clip_g": "text_encoder_2"}  # of a textual inversion for SDXL
ENCODERS = ("image_encoder_folder", "image_encoder_pretrained_model_name_or_path")  # arguments of load_ip_adapter


def controlnet_class(name: str) -> Any:
    """Return the class of the ControlNet form of a text-to-image pipeline `name`. UserError if diffusers has none."""
    import diffusers

    if "ControlNet" in name:
        return getattr(diffusers, name)
    cls = getattr(diffusers, name.replace("Pipeline", "ControlNetPipeline"), None)
    if cls is None:
        raise UserError(f"load.controlnet is set, but diffusers has no ControlNet pipeline of {name}: leave it out, or "
                        "take SD 1.5, SDXL, SD3, FLUX or Qwen-Image")
    return cls


def with_controlnet(pipe: Any, source: str, dtype: torch.dtype) -> Any:
    """Return a pipeline of the same parts with a ControlNet. source: its folder or hub id. UserError where it does not
    load, and for one of another kind of model."""
    import diffusers

    cls = controlnet_class(type(pipe).__name__)
    parameters = inspect.signature(cls.__init__).parameters
    try:
        kind = diffusers.ControlNetModel.load_config(source)["_class_name"]
        if not re.search(rf"\b{kind}\b", str(parameters["controlnet"].annotation)):
            raise UserError(f"it is a {kind}, and a {cls.__name__} takes another")
        control = getattr(diffusers, kind).from_pretrained(source, dtype=dtype)
        denoiser = getattr(pipe, "unet", None) or getattr(pipe, "transformer", None)
        for name in WIDTHS:
            expected, got = getattr(denoiser.config, name, None), getattr(control.config, name, None)
            if None not in (expected, got) and expected != got:
                raise UserError(f"its {name} is {got}, and the model's is {expected}")
    except Exception as error:  # third-party files can raise anything
        raise UserError(f"load.controlnet is {source!r}, which does not load ({_short(error)}): expected the folder or "
                        f"hub id of a ControlNet of the model's kind, with a config.json") from None
    parts = pipe.components | {"controlnet": control}
    settings = {name: pipe.config[name] for name in parameters if name not in parts and name in pipe.config}
    return cls(**{name: part for name, part in parts.items() if name in parameters}, **settings)


def add_ip_adapter(pipe: Any, adapter: IPAdapter) -> None:
    """Load an IP-Adapter, and its image encoder where the pipeline has none, into a pipeline. UserError where it does
    not load, and for a pipeline that takes none."""
    if not hasattr(pipe, "load_ip_adapter"):
        raise UserError(f"load.ip_adapter is set, but {type(pipe).__name__} takes no IP-Adapter: leave it out")
    takes = inspect.signature(pipe.load_ip_adapter).parameters
    options = {"weight_name": adapter.weights, "subfolder": adapter.subfolder or ""}
    if adapter.encoder is not None:
        options[next(name for name in ENCODERS if name in takes)] = adapter.encoder
    try:
        pipe.load_ip_adapter(adapter.path, **options)
        pipe.set_ip_adapter_scale(adapter.scale)
    except Exception as error:  # third-party files can raise anything
        raise UserError(f"load.ip_adapter: {adapter.weights} of {adapter.path!r} does not load into "
                        f"{type(pipe).__name__} ({_short(error)}): expected an IP-Adapter of the model's kind, with "
                        "its image encoder") from None
    if getattr(pipe, "image_encoder", None) is None:
        raise UserError(f"load.ip_adapter: {adapter.path!r} has no image encoder: set load.ip_adapter.encoder to its "
                        "folder")


def add_inversion(pipe: Any, inversion: Inversion) -> None:
    """Add a textual inversion's embeddings to the text encoders of a pipeline, and its token to their tokenizers.

    The file holds a tensor [n, width] for each CLIP encoder: clip_l and clip_g, or one under its token's name or
    emb_params. Raises UserError for a pipeline that takes none, and for other tensors.
    """
    path = inversion.path
    if not hasattr(pipe, "load_textual_inversion"):
        raise UserError(f"load.textual_inversion is set, but {type(pipe).__name__} takes none: leave it out")
    given = {key: value if value.ndim > 1 else value[None] for key, value in tensors_of(path)[0].items()}
    token = inversion.token or (next(iter(given)) if len(given) == 1 and "emb_params" not in given else Path(path).stem)
    encoders = {name: part for name, part in pipe.components.items() if name.startswith("text_encoder") and part}
    widths = {name: part.get_input_embeddings().weight.shape[1] for name, part in encoders.items()}
    of = {SIDES.get(key) or next((name for name, width in widths.items() if width == value.shape[1]), ""): value
          for key, value in given.items()}
    clips = {name for name, part in encoders.items() if type(part).__name__.startswith("CLIP")}
    if len(of) < len(given) or not clips <= of.keys() or any(widths.get(key) != of[key].shape[1] for key in of):
        got = ", ".join(f"{key} of width {value.shape[1]}" for key, value in given.items())
        expected = " and ".join(f"{widths[name]} for the {name}" for name in sorted(clips or widths))
        raise UserError(f"load.textual_inversion: {path} holds {got}: expected embeddings of width {expected}")
    try:
        for name, value in of.items():
            tokenizer = getattr(pipe, name.replace("text_encoder", "tokenizer"))
            pipe.load_textual_inversion({token: value}, token, tokenizer, encoders[name])
    except Exception as error:  # of diffusers, such as for a token that is a word of the tokenizer
        raise UserError(f"load.textual_inversion: {path} does not load ({_short(error)}): set its token to a name that "
                        "is no word of the tokenizer") from None
    tell(f"load.textual_inversion {path}: the token {token!r} is {quantity(len(next(iter(of.values()))), 'embedding')} "
         f"of the {' and the '.join(of)}")


def has_ip_adapter(pipe: Any) -> bool:
    """Return True if a pipeline's denoiser reads the embedding of an image by an IP-Adapter."""
    parts = [getattr(pipe, name, None) for name in ("unet", "transformer")]
    return any(part is not None and (getattr(part.config, "encoder_hid_dim_type", None) == "ip_image_proj"
                                     or getattr(part, "image_proj", None) is not None) for part in parts)


def require_prompts(config: Config, prompts: Sequence[Prompt], pipe: Any = None) -> None:
    """Raise UserError for the first prompt whose files the run's pipeline does not take, or that lacks one. pipe: the
    pipeline; None before it is loaded, when the class of a local folder is imported only where a prompt has a file or
    needs one."""
    if pipe is None and config.load.controlnet is None and config.load.ip_adapter is None and not any(
            prompt.brings is not None for prompt in prompts) and not prompt_inputs.EDITORS.search(_class_name(config)):
        return
    cls = type(pipe) if pipe is not None else class_of(config)
    present = has_ip_adapter(pipe) if pipe is not None else config.load.ip_adapter is not None or None
    # A model with `image_dim` embeds a first frame, and with `pos_embed_seq_len` (Wan FLF2V) a last one too.
    embeds = getattr(getattr(pipe, "transformer", None), "config", {})
    last = None if embeds.get("image_dim") is None else embeds.get("pos_embed_seq_len") is not None
    if cls is not None:
        prompt_inputs.require(cls, prompts, config.call, present, last)


def class_of(config: Config) -> Any:
    """Return the class of the pipeline that a run will load; None where no local folder says it."""
    if not (name := _class_name(config)):
        return None
    return controlnet_class(name) if config.load.controlnet is not None else modular.class_of(name)


def _class_name(config: Config) -> str:
    """Return the name of the pipeline's class by a local folder; "" where none says it."""
    index = sources.described(sources.index_file(Path(FOLDERS.get(config.model, config.model))))
    return str(index.get("_class_name", ""))


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
