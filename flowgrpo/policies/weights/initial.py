"""Existing LoRA from which a run starts: comparison with the trained one, and its values in full precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.files import tensors_of
from flowgrpo.policies.weights import adapters
from flowgrpo.policies.weights.lora_files import LORA_FILE

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

NAME = "init"  # of the adapter while it is read
LIVE = "default"


def require_layers(setting: str, path: Path, modules: dict[str, torch.nn.Module], layers: dict[str, LoraLayer],
                   others: dict[str, torch.nn.Module]) -> None:
    """Raise UserError if the LoRA of a path has other layers than the trained one.

    setting: the key that names the path. modules: trained ones. layers: of these modules, that have either LoRA.
    others: modules that are not trained.
    """
    for name, other in others.items():
        if NAME in adapters.named(other):
            raise UserError(f"{setting} {path}: its LoRA is also of the {name}, but the run trains "
                            f"{' and '.join(modules)}: expected a LoRA of these alone")
    for key, layer in layers.items():
        has, expected = NAME in layer.lora_A, LIVE in layer.lora_A
        if has != expected:
            what = "has no layer" if expected else "has a layer"
            raise UserError(f"{setting} {path}: its LoRA {what} {key}, which adapter.targets "
                            f"{'do' if expected else 'do not'} name: set adapter.targets to those of the LoRA")


def require_same(path: Path, modules: dict[str, torch.nn.Module], layers: dict[str, LoraLayer],
                 others: dict[str, torch.nn.Module]) -> None:
    """Raise UserError if the LoRA of a path differs from the trained one in its layers, ranks, scales or form.

    Arguments: as of `require_layers`.
    """
    require_layers("adapter.init", path, modules, layers, others)
    for layer in layers.values():
        ranks = [layer.r[name] for name in (NAME, LIVE)]
        if ranks[0] != ranks[1]:
            raise UserError(f"adapter.init {path}: its LoRA has rank {ranks[0]}, expected adapter.rank {ranks[1]}: set "
                            f"adapter.rank to {ranks[0]}")
        scales = [layer.scaling[name] for name in (NAME, LIVE)]
        if abs(scales[0] - scales[1]) > 1e-6 * abs(scales[1]):
            raise UserError(f"adapter.init {path}: its LoRA has the scale {scales[0]:g}, expected {scales[1]:g}: set "
                            f"adapter.alpha to {scales[0] * ranks[0]:g}, without adapter.rslora")
        if (NAME in layer.lora_magnitude_vector) != (LIVE in layer.lora_magnitude_vector):
            raise UserError(f"adapter.init {path}: one of its LoRA and the trained one is a DoRA: set adapter.dora to "
                            f"{str(NAME in layer.lora_magnitude_vector).lower()}")


@torch.no_grad()
def values(path: Path, named: dict[str, torch.nn.Parameter], layers: dict[str, LoraLayer]) -> dict[str, torch.Tensor]:
    """Return the LoRA's values by the names of the trained parameters.

    They come from the files where these have the names that `save` writes: loaded layers are in the model's precision.
    """
    loaded = {f"{key}.{part}.{LIVE}{ending}": value for key, layer in layers.items()
              for part, ending, value in _parts(layer)}
    exact = dict(_tensors(path))
    return {key: exact.get(key.replace(f".{LIVE}", ""), loaded[key]) for key in named if key in loaded}


def scales(layers: dict[str, LoraLayer]) -> dict[str, float]:
    """Return the scale of each layer's LoRA that is read, over that of the live one."""
    return {key: layer.scaling[NAME] / layer.scaling[LIVE] for key, layer in layers.items()}


def whole(path: Path, named: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return the values of all weights in a model's folder, or in a run's that trained them.

    Raises UserError for a weight that is not there, or has another shape.
    """
    files = [(file, file.parent.name) for file in sorted(path.glob("*/*.safetensors"))]
    files += [(file, "model") for file in sorted(path.glob("*.safetensors"))]
    values = {f"{part}.{key}": value for file, part in files for key, value in tensors_of(file)[0].items()}
    for key, parameter in named.items():
        if key not in values or values[key].shape != parameter.shape:
            got = f"{key} in the shape {list(values[key].shape)}" if key in values else f"no weight {key}"
            raise UserError(f"parts.reference.models {path}: got {got}, expected a folder of the trained model's "
                            f"weights with {key} in the shape {list(parameter.shape)}")
    return {key: values[key].float() for key in named}


def _parts(layer: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield a layer's parts, the end of their parameters' names, and the values of the LoRA that is read."""
    for part in ("lora_A", "lora_B", "lora_magnitude_vector"):
        if NAME in getattr(layer, part):
            yield part, ".weight", getattr(layer, part)[NAME].weight.data.clone()


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a path's files, with names that begin with their module's."""
    folder = path.parent if path.is_file() else path
    for file in [path] if path.is_file() else [folder / LORA_FILE, *folder.glob(f"*/{LORA_FILE}")]:
        for key, value in tensors_of(file)[0].items() if file.is_file() else ():
            _, _, rest = key.partition(".")
            yield (key if file.parent == folder else f"{file.parent.name}.{rest}"), value
    for file in (folder / adapters.WEIGHTS, *folder.glob(f"*/{adapters.WEIGHTS}")) if path.is_dir() else ():
        for key, value in tensors_of(file)[0].items() if file.is_file() else ():
            name = "model" if file.parent == folder else file.parent.name  # a language model's lies in the folder
            yield f"{name}.{key.removeprefix('base_model.model.')}", value
