"""Adapters of any module, added, saved, loaded and removed by peft alone; and NaN and infinities in trained weights,
which are refused before weights are saved and when they are read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flowgrpo.distributed.shards import local
from flowgrpo.errors import UserError, excerpt
from flowgrpo.files import parse_json
from flowgrpo.storage.json_files import read_object
from flowgrpo.storage.manifest import order_config

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

INTEGERS = ("alpha", "position_ids", "num_batches_tracked")  # ends of names of tensors that may hold integers
NO_NUMBERS = (torch.bool, torch.complex32, torch.complex64, torch.complex128)
LARGEST = 1e6  # of a weight; those of trained adapters are below 100
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
METADATA = "lora_adapter_metadata"  # of diffusers' files
WRAPPED = "base_model.model."  # of the names in files that `PeftModel.from_pretrained` reads
SCALED = ".lora_B.weight"


@torch.no_grad()
def odd(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Name of the first tensor that holds NaN or an infinity; None if all are finite.

    Of a sharded one this process's rows are read, of a quantized one (torchao) its scales.
    """
    held = [(key, part) for key, tensor in tensors.items() for part in _plain(local(tensor))]
    floats = [(key, part) for key, part in held if part.is_floating_point() and not part.is_meta]
    flags = [(part.float() if part.element_size() == 1 else part).isfinite().all() for _, part in floats]
    if not flags:
        return None
    known = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()  # the host waits once
    return next((key for (key, _), finite in zip(floats, known) if not finite), None)


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors that one is made of: itself, unless it wraps others, which may lack `isfinite`."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner: Any = tensor
    return [part for name in inner.__tensor_flatten__()[0] for part in _plain(getattr(inner, name))]


def culprit(parts: Mapping[str, Any], buffers: bool = True) -> str | None:
    """Line about the first weight of a model's parts that is not finite; None if all are.

    parts: modules by name; anything else is not looked at. buffers: look at these too.
    """
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module) and (key := odd({**dict(part.named_parameters()),
                                                              **dict(part.named_buffers() if buffers else ())})):
            weight = f"{name}.{key}".replace(".base_layer", "")
            return f"the model's own {weight} holds NaN or an infinity: load whole weights"
    return None


def require_saved(tensors: Mapping[str, torch.Tensor], epoch: int, anywhere: Callable[[bool], bool] = bool) -> None:
    """Raise UserError if weights that are to be saved are not finite. anywhere: if a flag is set on any process."""
    key = odd(tensors)
    if anywhere(key is not None):
        where = f"such as {key}" if key else "on another process"
        raise UserError(f"the trained weights are not finite after epoch {epoch} ({where}): they are not saved, and "
                        "earlier checkpoints stay: lower train.lr or train.clip_grad, and --resume or begin anew")


def require_read(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise UserError if weights that were read from a path are no real numbers, not finite, or above LARGEST."""
    if key := odd(tensors):
        raise UserError(f"{path}: {key} holds NaN or an infinity, expected finite weights: take those of an earlier "
                        "checkpoint")
    for key, tensor in tensors.items():
        if not (tensor.is_floating_point() or key.endswith(INTEGERS) and tensor.dtype not in NO_NUMBERS):
            raise UserError(f"{path}: {key} is of {str(tensor.dtype).removeprefix('torch.')}, expected weights in "
                            "float32, float16 or bfloat16: is it another file?")
        values = local(tensor)
        if tensor.is_floating_point() and values.numel() and (most := float(
                (values.float() if values.element_size() == 1 else values).abs().max())) > LARGEST:
            raise UserError(f"{path}: {key} holds {most:.1e}, expected weights up to {LARGEST:.0e}: the training "
                            "diverged, take those of an earlier checkpoint")


def said_of(file: Path, metadata: Mapping[str, str], whole: bool = True) -> dict[str, Any]:
    """Configuration of a LoRA's file: peft's, beside it, or diffusers' metadata; empty without either.

    Keys of the metadata begin with the part, as in `unet.r`.

    whole: a rank and an alpha have to be there. Raises UserError for another kind of adapter, and for a rank or an
    alpha that is none.
    """
    beside = file.with_name(CONFIG)
    if file.name == WEIGHTS and beside.is_file():
        file, said = beside, read_object(beside, "expected peft's configuration of a LoRA")
    else:
        try:
            said = dict(parse_json(metadata.get(METADATA, "{}")))
        except (TypeError, ValueError) as error:
            raise UserError(f"{file} has no readable {METADATA} ({error}): expected that of diffusers") from None
    for prefix in dict.fromkeys(key[:key.rfind(".") + 1] for key in said):
        if (kind := said.get(f"{prefix}peft_type") or "LORA") != "LORA":
            raise UserError(f"{file} is of a {kind}, expected a LoRA")
        for name, noun, least, expected in (("r", "rank", 1, "a whole number of 1 or more"),
                                            ("lora_alpha", "alpha", -math.inf, "a number")):
            several = said.get(f"{prefix}{noun}_pattern") or {}
            values = [*several.values()] if isinstance(several, dict) else [several]
            for value in [said.get(prefix + name), *values] if whole or prefix + name in said else values:
                if type(value) not in ((int,) if name == "r" else (int, float)) or not least <= value < math.inf:
                    raise UserError(f"{file} does not say its {noun}: {prefix}{name} is {excerpt(value)}, expected "
                                    f"{expected}: write it again with the tool that made it")
            if not isinstance(several, dict):
                raise UserError(f"{file}: its {prefix}{noun}_pattern is {excerpt(several)}, expected one by layer")
    return said


def add(module: torch.nn.Module, config: LoraConfig, name: str) -> None:
    """Add an adapter to a module, and make it the one in use."""
    from peft.functional import inject_adapter_in_model

    inject_adapter_in_model(config, module, name)
    _tell(module, True)


def lora_layers(module: torch.nn.Module) -> dict[str, LoraLayer]:
    from peft.tuners.lora import LoraLayer

    return {key: layer for key, layer in module.named_modules() if isinstance(layer, LoraLayer)}


def adapter_configs(module: torch.nn.Module) -> dict[str, Any]:
    """Configuration of each of a module's adapters, by its name."""
    return getattr(module, "peft_config", None) or {}


def fold_alpha(module: Any) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Configuration and weights of the adapter "default" as files hold them: alpha equal to the rank.

    Each layer's scale is in its B, so that programs that read no alpha apply the whole LoRA.
    """
    from peft.functional import get_peft_model_state_dict

    config = copy(module.peft_config["default"])
    config.lora_alpha, config.use_rslora, config.alpha_pattern = config.r, False, dict(config.rank_pattern)
    state: dict[str, Any] = get_peft_model_state_dict(module, save_embedding_layers=False)
    for key in [key for key in state if key.endswith(SCALED)]:
        scale = module.get_submodule(key.removesuffix(SCALED)).scaling["default"]
        state[key] = state[key] if scale == 1 else state[key] * scale
    return config, state


def save(module: Any, folder: Path, wrapped: bool = False) -> None:
    """Write the adapter "default" of a module, `fold_alpha`: its configuration and its weights.

    wrapped: with the names that `PeftModel.from_pretrained` reads; others are for `inject_adapter_in_model` and
    `set_peft_model_state_dict`. `load` reads both.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, state = fold_alpha(module)
    config.save_pretrained(str(folder))
    order_config(folder / CONFIG)
    prefix = WRAPPED if wrapped else ""
    save_file({prefix + key: value.contiguous() for key, value in state.items()}, folder / WEIGHTS,
              metadata={"format": "pt"})


def same(layer: LoraLayer, name: str) -> bool:
    """True if a layer's adapter of that name has the weights that `fold_alpha` makes of "default"."""
    parts: list[Any] = [layer.lora_A, layer.lora_B, layer.lora_magnitude_vector]
    sides = [(part[name].weight, part["default"].weight * (layer.scaling["default"] if part is layer.lora_B else 1))
             for part in parts if "default" in part and name in part]
    # Loaded weights, and the live ones of a text encoder, have the dtype of the module.
    return layer.scaling[name] == 1 and len(sides) == sum("default" in part for part in parts) and all(
        torch.equal(loaded, live.to(loaded)) for loaded, live in sides)


def load(module: torch.nn.Module, folder: Path, name: str = "default") -> None:
    """Load the LoRA of a folder as an adapter of that name, and make it the one in use.

    Raises UserError for a file without one of the layers, with a layer that the module lacks, or with weights that are
    not finite.
    """
    from peft import LoraConfig
    from peft.functional import inject_adapter_in_model, set_peft_model_state_dict

    said_of(folder / WEIGHTS, {})
    state = {key.removeprefix(WRAPPED): value for key, value in load_file(folder / WEIGHTS).items()}
    require_read(folder / WEIGHTS, state)
    inject_adapter_in_model(LoraConfig.from_pretrained(str(folder)), module, name)
    _tell(module, True)
    loaded: Any = set_peft_model_state_dict(module, state, name)
    odd = [*loaded.unexpected_keys, *(key for key in loaded.missing_keys if f".{name}." in key)]
    if odd:
        has = "has" if loaded.unexpected_keys else "has no"
        raise UserError(f"{folder} was trained on another model: it {has} {odd[0]}")


def delete(module: Any, name: str) -> None:
    """Remove one adapter; a module without it is unchanged."""
    from peft.functional import delete_adapter

    if name not in adapter_configs(module):
        return
    delete_adapter(module, name, prefix="lora_")
    del module.peft_config[name]
    if not module.peft_config:
        remove(module)


def merge(module: torch.nn.Module) -> None:
    """Merge a module's LoRA into its weights and remove it; a module without one is unchanged.

    Where a weight with a LoRA is another layer's too, such as an output layer's that is tied to the embeddings, every
    layer gets its own first. Raises UserError for a model whose configuration cannot say so.
    """
    layers = lora_layers(module)
    uses = Counter(id(value) for part in module.modules() for value in part._parameters.values())
    if shared := [key for key, layer in layers.items() if uses[id(layer.get_base_layer().weight)] > 1]:
        _untie(module, shared[0])
    for layer in layers.values():
        layer.merge()
    remove(module)


def _untie(module: Any, key: str) -> None:
    """Give every layer its own weights, and have the module's files hold them. key: of a layer with a tied one."""
    config: Any = getattr(module, "config", None)
    tied = [each for each in (config, getattr(config, "get_text_config", lambda: None)())
            if getattr(each, "tie_word_embeddings", False)]
    if not tied:
        raise UserError(f"the LoRA of {key} does not merge: its weight is another layer's too, and the configuration "
                        f"of {type(module).__name__} has no tie_word_embeddings: use the LoRA's own file")
    for each in tied:
        each.tie_word_embeddings = False
    seen: set[int] = set()
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None and id(value) in seen:
                part._parameters[name] = torch.nn.Parameter(value.detach().clone(), value.requires_grad)
            seen.add(id(value))


def remove(module: torch.nn.Module) -> None:
    """Remove all adapters, whatever added them, and their empty layers; a module without one is unchanged."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for key, layer in [*module.named_modules()]:
        if isinstance(layer, BaseTunerLayer):
            module.set_submodule(key, layer.get_base_layer())
    if hasattr(module, "peft_config"):  # otherwise the module would be saved as an adapter
        del module.peft_config
        _tell(module, False)


def _tell(module: Any, adapted: bool) -> None:
    """Set the flag by which the methods of transformers and diffusers know that a module has adapters."""
    if hasattr(module, "_hf_peft_config_loaded"):
        module._hf_peft_config_loaded = adapted
