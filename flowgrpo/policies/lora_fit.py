"""Comparison of a run's LoRA with a model's files by their headers, before the model is loaded."""

from __future__ import annotations

from pathlib import Path

from flowgrpo.config.sections import Load
from flowgrpo.errors import UserError
from flowgrpo.files import shapes_of
from flowgrpo.policies import sources
from flowgrpo.policies.checkpoints import config_of
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.starter import FOLDERS
from flowgrpo.storage.places import STATE, is_checkpoint

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3")  # others are packed, and have other shapes


def trained_on(path: Path) -> str:
    """Return the model that a run's weights were trained on, as the end of a message; empty for other weights."""
    config = config_of(path.parent if path.is_file() else path)
    return "" if config is None else f"; its run was trained on {config.model!r}"


def require_fit(model: str, path: Path, files: Load = Load()) -> None:
    """Raise UserError for a run's LoRA of layers that a pipeline's folder lacks, or has in another size.

    files: where else the model's weights are. What cannot be read without loading the model is left to that.
    """
    folder, origin = Path(FOLDERS.get(model, model)), trained_on(path)
    if not origin or sources.assembled(model, files) or not (folder / "model_index.json").is_file():
        return
    known: dict[str, dict[str, tuple[str, list[int]]]] = {}
    for layer, (inner, outer) in _layers(path).items():
        component, _, name = layer.partition(".")
        if component not in known:
            known[component] = {key: value for file in sorted((folder / component).glob("*.safetensors"))
                                for key, value in shapes_of(file).items()}
        if not (folder / component).is_dir():
            raise UserError(f"{path} holds a LoRA of the {component}, which {model} does not have{origin}")
        if not known[component]:
            continue
        kind, shape = known[component].get(f"{name}.weight", ("F32", []))
        if kind in FLOATS and shape[:2] != [outer, inner]:
            there = " x ".join(map(str, shape[:2])) or "absent"
            raise UserError(f"{path} does not fit {model}: the layer {layer} of its LoRA is {outer} x {inner}, and "
                            f"{there} there{origin}")


def _layers(path: Path) -> dict[str, tuple[int, int]]:
    """Return the (inputs, outputs) of the layers of a LoRA by name; empty for weights in another form."""
    file = path / STATE if is_checkpoint(path) else path if path.is_file() else path / LORA_FILE
    if not file.is_file() or file.suffix != ".safetensors":
        return {}
    shapes = {key.removeprefix("weights/").replace(".default.weight", ".weight"): shape
              for key, (_, shape) in shapes_of(file).items() if not key.startswith(("ema/", "optimizer/"))}
    ups = {key.removesuffix(".lora_B.weight"): shape for key, shape in shapes.items() if key.endswith(".lora_B.weight")}
    return {name: (shapes[f"{name}.lora_A.weight"][1], up[0]) for name, up in ups.items()
            if f"{name}.lora_A.weight" in shapes and "/" not in name}
