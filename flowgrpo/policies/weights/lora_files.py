"""LoRA files of a pipeline: the format that stock diffusers loads, or peft's if it has no loader for a denoiser.

Also the LoRA from which a run starts: its comparison with the trained one, and its values in full precision.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.files import tensors_of
from flowgrpo.log import quiet
from flowgrpo.packages import broken
from flowgrpo.policies.weights import adapters, finite, lora_forms
from flowgrpo.storage.places import CONFIG, is_checkpoint
from flowgrpo.storage.tensor_files import order_metadata

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

SIZES = re.compile(r"size mismatch for (\S+): .*?torch\.Size\((\[.*?\])\).*?torch\.Size\((\[.*?\])\)")  # torch's own
LORA_FILE = "pytorch_lora_weights.safetensors"
INIT, LIVE = "init", "default"  # adapters: the LoRA from which a run starts while it is read, and the trained one
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


def attach(pipe: Any, modules: dict[str, torch.nn.Module], path: Path, adapter: str) -> str:
    """Load a LoRA from its file, or from a folder as `load_lora` does, as an adapter of that name.

    modules: those that may have one, by name. Returns what was applied, in words. Raises UserError if it does not
    load, or in part.
    """
    path = path.parent if path.name == adapters.WEIGHTS and path.with_name(adapters.CONFIG).is_file() else path
    files = _files(path)
    held = lora_forms.join([lora_forms.read(file) for file in files])
    try:
        with quiet():  # a second adapter, and none for the text encoders, are intended
            if path.is_file():
                given = {"pretrained_model_name_or_path_or_dict": held.tensors} if held.changed else {
                    "pretrained_model_name_or_path_or_dict": path.parent, "weight_name": path.name}
                pipe.load_lora_weights(**given, adapter_name=adapter)
            elif (path / adapters.CONFIG).is_file():
                adapters.load(_of_peft(pipe, modules, path, held), path, adapter)
            else:
                load_lora(pipe, modules, path, adapter)
    except UserError:
        raise
    except Exception as error:  # third-party files can raise anything
        said = " ".join(str(error).split())
        if sizes := SIZES.search(said):
            said = f"size mismatch for {sizes[1]}, {sizes[2]} in the file and {sizes[3]} in the model"
        if isinstance(error, KeyError):  # of a converter that expects all layers
            said = f"as diffusers reads its form, the file lacks {said}; {lora_forms.doubt(held)}"
        raise UserError(f"{path} does not load into {type(pipe).__name__}: {broken(error) or said[:300]}") from error
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    return lora_forms.require_applied(path, held, pipe, parts, adapter)


def _files(path: Path) -> list[Path]:
    """Return the LoRA files of a path, itself a file or a folder."""
    if path.is_file():
        return [path]
    return [file for name in (LORA_FILE, adapters.WEIGHTS) for file in [path / name, *sorted(path.glob(f"*/{name}"))]
            if file.is_file()]


def _of_peft(pipe: Any, modules: dict[str, torch.nn.Module], path: Path, held: lora_forms.Held) -> torch.nn.Module:
    """Return the module whose layers a peft folder's LoRA has. Raises UserError if there is none."""
    names = {layer.removeprefix(adapters.WRAPPED) for layer in held.sizes}
    for module in modules.values():
        if names <= {name for name, _ in module.named_modules()}:
            return module
    raise UserError(f"{path} holds no LoRA layer for {type(pipe).__name__}: {lora_forms.doubt(held)}")


def tell(line: str) -> None:
    """Print a line to stderr, from the first of several processes."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def save_stock(pipe: Any, folder: Path, modules: dict[str, str]) -> None:
    """Write the format of `load_lora_weights`, `adapters.folded`; modules: the component by its name in the file."""
    arguments: dict[str, Any] = {}
    for written, name in modules.items():
        config, arguments[f"{written}_lora_layers"] = adapters.folded(getattr(pipe, name))
        described = config.to_dict()  # with sets, whose order is another in every process
        arguments[f"{written}_lora_adapter_metadata"] = {
            key: sorted(value) if isinstance(value, set) else value for key, value in described.items()}
    type(pipe).save_lora_weights(folder, **arguments)
    order_metadata(folder / LORA_FILE)


def fuse(pipe: Any, modules: dict[str, torch.nn.Module], path: Path, scale: float) -> None:
    """Add a LoRA to a pipeline's weights for good. modules: those that may have one, by name. scale: its factor."""
    from peft.tuners.lora import LoraLayer

    tell(f"load.lora {attach(pipe, modules, path, 'default')}")
    for module in modules.values():
        for layer in module.modules():
            if isinstance(layer, LoraLayer):
                layer.scale_layer(scale)
        adapters.merge(module)


# --- a LoRA from which a run starts ----------------------------------------------------------------------------------

def require_layers(setting: str, path: Path, modules: dict[str, torch.nn.Module], layers: dict[str, LoraLayer],
                   others: dict[str, torch.nn.Module]) -> None:
    """Raise UserError if the LoRA of a path has other layers than the trained one.

    setting: the key that names the path. modules: trained ones. layers: of these modules, that have either LoRA.
    others: modules that are not trained.
    """
    for name, other in others.items():
        if INIT in adapters.named(other):
            raise UserError(f"{setting} {path}: its LoRA is also of the {name}, but the run trains "
                            f"{' and '.join(modules)}: expected a LoRA of only these")
    for key, layer in layers.items():
        has, expected = INIT in layer.lora_A, LIVE in layer.lora_A
        if has != expected:
            what = "has no layer" if expected else "has a layer"
            raise UserError(f"{setting} {path}: its LoRA {what} {key}, which adapter.targets "
                            f"{'do' if expected else 'do not'} name: set adapter.targets to those of the LoRA")


def require_same(path: Path, modules: dict[str, torch.nn.Module], layers: dict[str, LoraLayer],
                 others: dict[str, torch.nn.Module]) -> None:
    """Raise UserError if the LoRA of a path differs from the trained one in its layers, ranks or form.

    Arguments: as of `require_layers`.
    """
    require_layers("adapter.init", path, modules, layers, others)
    for layer in layers.values():
        ranks = [layer.r[name] for name in (INIT, LIVE)]
        if ranks[0] != ranks[1]:
            raise UserError(f"adapter.init {path}: its LoRA has rank {ranks[0]}, expected adapter.rank {ranks[1]}: set "
                            f"adapter.rank to {ranks[0]}")
        if (INIT in layer.lora_magnitude_vector) != (LIVE in layer.lora_magnitude_vector):
            raise UserError(f"adapter.init {path}: one of its LoRA and the trained one is a DoRA: set adapter.dora to "
                            f"{str(INIT in layer.lora_magnitude_vector).lower()}")


@torch.no_grad()
def initial_values(path: Path, named: dict[str, torch.nn.Parameter], layers: dict[str, LoraLayer]
                   ) -> dict[str, torch.Tensor]:
    """Return the LoRA's values by the names of the trained parameters, which act with the live scale as with its own.

    They come from the files where these have the names that `save` writes: loaded layers are in the model's precision.
    """
    loaded = {f"{key}.{part}.{LIVE}{ending}": value for key, layer in layers.items()
              for part, ending, value in _parts(layer)}
    exact = dict(_tensors(path))
    values = {key: exact.get(key.replace(f".{LIVE}", ""), loaded[key]) for key in named if key in loaded}
    for key, layer in layers.items():
        own, live, up = layer.scaling[INIT], layer.scaling[LIVE], f"{key}.lora_B.{LIVE}.weight"
        if own != live:
            values[up] = values[up] * own / live
    return values


def whole_values(path: Path, named: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
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
        if INIT in getattr(layer, part):
            yield part, ".weight", getattr(layer, part)[INIT].weight.data.clone()


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a path's files, with names that begin with their module's."""
    folder = path.parent if path.is_file() else path
    for file in [path] if path.is_file() else [folder / LORA_FILE, *folder.glob(f"*/{LORA_FILE}")]:
        for key, value in lora_forms.read(file).tensors.items() if file.is_file() else ():
            _, _, rest = key.partition(".")
            yield (key if file.parent == folder else f"{file.parent.name}.{rest}"), value
    for file in (folder / adapters.WEIGHTS, *folder.glob(f"*/{adapters.WEIGHTS}")) if path.is_dir() else ():
        for key, value in tensors_of(file)[0].items() if file.is_file() else ():
            name = "model" if file.parent == folder else file.parent.name  # a language model's lies in the folder
            yield f"{name}.{key.removeprefix('base_model.model.')}", value
