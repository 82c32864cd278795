"""LoRA files: the format that stock diffusers loads, or peft's own format if it has no loader for a denoiser."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from flowgrpo.errors import UserError
from flowgrpo.storage.tensor_files import order_metadata

if TYPE_CHECKING:
    from peft import LoraConfig

LORA_FILE = "pytorch_lora_weights.safetensors"
PIPELINE, EXPERT, PEFT = "load_lora_weights", "load_lora_weights(load_into_transformer_2=True)", \
    "peft.inject_adapter_in_model"


def loader(pipe: Any, name: str) -> str:
    """Return the loader of a LoRA of the denoiser or text encoder `name` of a stock pipeline: PIPELINE, EXPERT (Wan
    2.2) or PEFT."""
    writes = inspect.signature(getattr(pipe, "save_lora_weights", lambda: None)).parameters
    if not name.startswith("text_encoder") and not hasattr(getattr(pipe, name), "load_lora_adapter"):
        return PEFT
    if f"{name}_lora_layers" in writes and f"{name}_lora_adapter_metadata" in writes:
        return PIPELINE
    second = name == "transformer_2" and name in getattr(pipe, "_lora_loadable_modules", ())
    return EXPERT if second and "transformer_lora_layers" in writes else PEFT


def add_adapter(module: torch.nn.Module, config: LoraConfig, name: str) -> None:
    """Add an adapter to a module, also if its class does not support adapters."""
    from peft import inject_adapter_in_model

    adaptable: Any = module
    if hasattr(module, "add_adapter"):
        adaptable.add_adapter(config, name)
    else:
        inject_adapter_in_model(config, module, name)


def load_lora(pipe: Any, modules: dict[str, torch.nn.Module], folder: Path, adapter: str = "default") -> list[str]:
    """Load the LoRA that `Weights.save` wrote into a stock pipeline; return the loaders used, none without a LoRA.

    modules: those of the pipeline that may have one, by name.
    """
    used = []
    if (folder / LORA_FILE).is_file():
        pipe.load_lora_weights(folder, weight_name=LORA_FILE, adapter_name=adapter)
        used.append(PIPELINE)
    for name, module in modules.items():
        if (folder / name / LORA_FILE).is_file():
            pipe.load_lora_weights(folder / name, weight_name=LORA_FILE, adapter_name=adapter,
                                   load_into_transformer_2=True)
            used.append(EXPERT)
        elif (folder / name / "adapter_config.json").is_file():
            _load_peft(module, folder / name, adapter)
            used.append(PEFT)
    return used


def save_stock(pipe: Any, folder: Path, modules: dict[str, str]) -> None:
    """Write the format of `load_lora_weights`; modules: the component name by the name in the file."""
    from peft.utils import get_peft_model_state_dict

    arguments: dict[str, Any] = {}
    for written, name in modules.items():
        module = getattr(pipe, name)
        arguments[f"{written}_lora_layers"] = get_peft_model_state_dict(module)
        described = module.peft_config["default"].to_dict()  # with sets, whose order is another in every process
        arguments[f"{written}_lora_adapter_metadata"] = {
            key: sorted(value) if isinstance(value, set) else value for key, value in described.items()}
    type(pipe).save_lora_weights(folder, **arguments)
    order_metadata(folder / LORA_FILE)


def save_peft(module: Any, folder: Path) -> None:
    """Write the format of `inject_adapter_in_model` and `set_peft_model_state_dict`."""
    from peft.utils import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    module.peft_config["default"].save_pretrained(folder)
    save_file({key: value.contiguous() for key, value in get_peft_model_state_dict(module).items()},
              folder / "adapter_model.safetensors")


def merge(module: torch.nn.Module) -> None:
    """Merge a module's LoRA into its weights and remove it; a module without one is unchanged."""
    from peft.tuners.lora import LoraLayer

    for layer in [part for part in module.modules() if isinstance(part, LoraLayer)]:
        layer.merge()
    take_off(module)


def take_off(module: torch.nn.Module) -> None:
    """Remove a module's LoRA, whatever added it; a module without one is unchanged."""
    from diffusers.utils import recurse_remove_peft_layers

    recurse_remove_peft_layers(module)
    adapted: Any = module
    if hasattr(module, "peft_config"):  # otherwise the module would be saved as an adapter
        del adapted.peft_config
        adapted._hf_peft_config_loaded = False


def _load_peft(module: torch.nn.Module, folder: Path, adapter: str) -> None:
    from peft import LoraConfig, inject_adapter_in_model
    from peft.utils import set_peft_model_state_dict

    inject_adapter_in_model(LoraConfig.from_pretrained(str(folder)), module, adapter)
    loaded: Any = set_peft_model_state_dict(module, load_file(folder / "adapter_model.safetensors"), adapter)
    if loaded.unexpected_keys:
        raise UserError(f"{folder} was trained on another model: it has {loaded.unexpected_keys[0]}")
