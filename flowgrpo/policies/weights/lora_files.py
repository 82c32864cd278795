"""LoRA files of a pipeline: the format that stock diffusers loads, or peft's if it has no loader for a denoiser."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.log import quiet
from flowgrpo.packages import broken
from flowgrpo.policies.weights import adapters, finite
from flowgrpo.storage.places import CONFIG, is_checkpoint
from flowgrpo.storage.tensor_files import order_metadata

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


def load_lora(pipe: Any, modules: dict[str, torch.nn.Module], folder: Path, adapter: str = "default") -> list[str]:
    """Load the LoRA that `Weights.save` wrote into a stock pipeline; return the loaders used, none without a LoRA.

    modules: those of the pipeline that may have one, by name. Raises UserError for weights that are not finite.
    """
    used = []
    if (folder / LORA_FILE).is_file():
        finite.require_file(folder / LORA_FILE)
        pipe.load_lora_weights(folder, weight_name=LORA_FILE, adapter_name=adapter)
        used.append(PIPELINE)
    for name, module in modules.items():
        if (folder / name / LORA_FILE).is_file():
            finite.require_file(folder / name / LORA_FILE)
            pipe.load_lora_weights(folder / name, weight_name=LORA_FILE, adapter_name=adapter,
                                   load_into_transformer_2=True)
            used.append(EXPERT)
        elif (folder / name / adapters.CONFIG).is_file():
            adapters.load(module, folder / name, adapter)
            used.append(PEFT)
    return used


def require_lora(setting: str, given: str) -> None:
    """Raise UserError if a path is neither a LoRA's file nor a folder with one. setting: what names it."""
    path = Path(given)
    if path.is_file() and path.suffix == ".safetensors" or (path / LORA_FILE).is_file() or any(
            path.glob(f"*/{LORA_FILE}")) or any(path.glob(adapters.CONFIG)) or any(
            path.glob(f"*/{adapters.CONFIG}")):
        return
    hint = "expected a finished run, a folder with a LoRA, or its .safetensors file"
    if is_checkpoint(path):
        hint = "it is a checkpoint, whose LoRA a finished run's folder has: give that"
    elif (path / CONFIG).is_file():
        hint = "the run has not finished: --resume it" if not (path / "summary.json").is_file() else \
            "the run trained all weights: give a LoRA"
    raise UserError(f"{setting} is {given!r}, which has no LoRA: {hint}")


def attach(pipe: Any, modules: dict[str, torch.nn.Module], path: Path, adapter: str) -> None:
    """Load a LoRA from its file, or from a folder as `load_lora` does, as an adapter of that name.

    Raises UserError if it does not load, or loads nothing.
    """
    try:
        with quiet():  # a second adapter, and none for the text encoders, are intended
            if path.is_file():
                finite.require_file(path)
                pipe.load_lora_weights(path.parent, weight_name=path.name, adapter_name=adapter)
            else:
                load_lora(pipe, modules, path, adapter)
    except UserError:
        raise
    except Exception as error:  # third-party files can raise anything
        why = broken(error) or " ".join(str(error).split())[:200]
        raise UserError(f"{path} does not load into {type(pipe).__name__}: {why}") from error
    parts: list[Any] = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    if not any(adapter in adapters.named(part) for part in parts):
        raise UserError(f"{path} holds no LoRA layer for {type(pipe).__name__}: was it trained on another model?")


def save_stock(pipe: Any, folder: Path, modules: dict[str, str]) -> None:
    """Write the format of `load_lora_weights`; modules: the component name by the name in the file."""
    from peft.functional import get_peft_model_state_dict

    arguments: dict[str, Any] = {}
    for written, name in modules.items():
        module = getattr(pipe, name)
        arguments[f"{written}_lora_layers"] = get_peft_model_state_dict(module)
        described = module.peft_config["default"].to_dict()  # with sets, whose order is another in every process
        arguments[f"{written}_lora_adapter_metadata"] = {
            key: sorted(value) if isinstance(value, set) else value for key, value in described.items()}
    type(pipe).save_lora_weights(folder, **arguments)
    order_metadata(folder / LORA_FILE)


def fuse(pipe: Any, modules: dict[str, torch.nn.Module], path: Path, scale: float) -> None:
    """Add a LoRA to a pipeline's weights for good. modules: those that may have one, by name. scale: its factor."""
    from peft.tuners.lora import LoraLayer

    attach(pipe, modules, path, "default")
    for module in modules.values():
        for layer in module.modules():
            if isinstance(layer, LoraLayer):
                layer.scale_layer(scale)
        adapters.merge(module)
