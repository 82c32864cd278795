"""Adapters of any module, added, saved, loaded and removed by peft alone.

transformers and diffusers have methods of their own for this. Those of transformers demand ever newer versions of peft.
"""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from flowgrpo.errors import UserError
from flowgrpo.policies.weights import finite
from flowgrpo.storage.tensor_files import order_config

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WRAPPED = "base_model.model."  # of the names in files that `PeftModel.from_pretrained` reads
SCALED = ".lora_B.weight"


def add(module: torch.nn.Module, config: LoraConfig, name: str) -> None:
    """Add an adapter to a module, and make it the one in use."""
    from peft.functional import inject_adapter_in_model

    inject_adapter_in_model(config, module, name)
    _tell(module, True)


def named(module: torch.nn.Module) -> dict[str, Any]:
    """Return the configuration of each of a module's adapters, by its name."""
    return getattr(module, "peft_config", None) or {}


def folded(module: Any) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Return the configuration and weights of the adapter "default" as files hold them: alpha equal to the rank.

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
    """Write the adapter "default" of a module, `folded`: its configuration and its weights.

    wrapped: with the names that `PeftModel.from_pretrained` reads; others are for `inject_adapter_in_model` and
    `set_peft_model_state_dict`. `load` reads both.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, state = folded(module)
    config.save_pretrained(str(folder))
    order_config(folder / CONFIG)
    prefix = WRAPPED if wrapped else ""
    save_file({prefix + key: value.contiguous() for key, value in state.items()}, folder / WEIGHTS,
              metadata={"format": "pt"})


def same(layer: LoraLayer, name: str) -> bool:
    """Return True if a layer's adapter of that name has the weights that `folded` makes of "default"."""
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

    state = {key.removeprefix(WRAPPED): value for key, value in load_file(folder / WEIGHTS).items()}
    finite.require_read(folder / WEIGHTS, state)
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

    if name not in named(module):
        return
    delete_adapter(module, name, prefix="lora_")
    del module.peft_config[name]
    if not module.peft_config:
        remove(module)


def merge(module: torch.nn.Module) -> None:
    """Merge a module's LoRA into its weights and remove it; a module without one is unchanged."""
    from peft.tuners.lora import LoraLayer

    for layer in [part for part in module.modules() if isinstance(part, LoraLayer)]:
        layer.merge()
    remove(module)


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
