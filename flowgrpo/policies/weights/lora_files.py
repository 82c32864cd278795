"""LoRA files of a pipeline: the format that stock diffusers loads, or peft's if it has no loader for a denoiser.

Loaders of diffusers read many forms and drop in silence what they do not know: a kohya file's DoRA, an alpha that some
layers lack, layers of a part that the pipeline does not have. So one reader of all commands proves that what a file
holds is what a pipeline got.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.files import tensors_of
from flowgrpo.log import quiet
from flowgrpo.nouns import quantity
from flowgrpo.packages import import_failure
from flowgrpo.policies.weights import adapters
from flowgrpo.storage.manifest import order_metadata
from flowgrpo.storage.places import CONFIG, is_checkpoint, unfinished

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

SIDE = re.compile(r"^(?P<layer>.+?)(?:[._]lora\w*?)?[._](?P<side>A|B|down|up)(?:\.\w+)?\.weight$")
KOHYA = "lora_"  # beginning of layers' names
ALPHA = ".alpha"
MAGNITUDE = ".lora_magnitude_vector"
SCALES = ".dora_scale"
# Tensors of other kinds of adapters, by a part of their names.
OTHERS = {".hada_": "LoHa", ".lokr_": "LoKr", ".oft_": "OFT", ".boft_": "BOFT", ".lora_mid": "LoCon with lora_mid",
          ".on_input": "IA3", ".diff_b": "difference of whole weights", ".diff": "difference of whole weights",
          ".lora_B.bias": "LoRA with biases", ".lora_up.bias": "LoRA with biases", ".b1.weight": "GLoRA",
          "emb_params": "textual inversion", "string_to_param": "textual inversion"}
WITHIN = 1e-2  # relative, of |B A|^2 where A and B were rounded to bf16: four times its unit roundoff of 2^-9
SIZES = re.compile(r"size mismatch for (\S+): .*?torch\.Size\((\[.*?\])\).*?torch\.Size\((\[.*?\])\)")  # torch's own
LORA_FILE = "pytorch_lora_weights.safetensors"
INIT, LIVE = "init", "default"  # adapters: the LoRA from which a run starts while it is read, and the trained one
PIPELINE = "load_lora_weights"
EXPERT = "load_lora_weights(load_into_transformer_2=True)"
PEFT = "peft.inject_adapter_in_model"


@dataclass
class Held:
    """LoRA of one file or of several: its tensors, and what its layers change.

    sizes: of each layer, the squared norm of scale * B A; without the scale where metadata state it. described: whether
    they do. magnitudes: of a DoRA, the sum of squares. changed: tensors differ from the file's.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    magnitudes: float = 0.0
    described: bool = False
    changed: bool = False


def read(path: Path) -> Held:
    """Read a LoRA's file.

    A layer without an alpha has the scale 1, as in kohya's scripts, also where others have one. Where alphas differ,
    or stand beside peft's names, they are multiplied into the weights: diffusers mixes them up, or refuses them. A file
    of kohya's without alphas gets those of the scale 1.

    Raises UserError for another kind of adapter, a DoRA of kohya's form, a layer without one of its sides, and for
    values that are not finite.
    """
    tensors, metadata = tensors_of(path)
    _require_kind(path, tensors)
    adapters.require_file(path, tensors)
    of_peft = path.name == adapters.WEIGHTS and path.with_name(adapters.CONFIG).is_file()
    held = Held(dict(tensors), described=of_peft or "lora_adapter_metadata" in metadata)
    sides: dict[str, dict[str, str]] = {}
    for key in tensors:
        if match := SIDE.match(key):
            sides.setdefault(match["layer"], {})["down" if match["side"] in ("A", "down") else "up"] = key
    scales: dict[str, float] = {}
    for layer, of in sides.items():
        if len(of) < 2:
            raise UserError(f"{path}: the layer {layer} lacks one of its sides: expected both sides of every layer")
        rank, alpha = tensors[of["down"]].shape[0], tensors.get(layer + ALPHA)
        scales[layer] = 1.0 if held.described or alpha is None else float(alpha) / rank
        held.sizes[layer] = scales[layer]**2 * _size(tensors[of["down"]], tensors[of["up"]])
    alphas = {float(tensors[layer + ALPHA]) if layer + ALPHA in tensors else None for layer in sides}
    peft = any(".lora_B" in of["up"] for of in sides.values())  # beside its names diffusers reads no alpha
    if not held.described and (len(alphas) > 1 or peft and alphas != {None}):
        held.changed = True
        for layer, of in sides.items():
            up = tensors[of["up"]]
            held.tensors[of["up"]] = up if scales[layer] == 1 else up.float() * scales[layer]
            held.tensors.pop(layer + ALPHA, None)
    if lacking := {layer: of for layer, of in sides.items() if ".lora_down." in of["down"]
                   and layer.startswith(KOHYA) and layer + ALPHA not in held.tensors}:
        held.changed = True  # some of diffusers' converters read no file of kohya's without it
        held.tensors |= {layer + ALPHA: torch.tensor(float(tensors[of["down"]].shape[0]))
                         for layer, of in lacking.items()}
    held.magnitudes = sum(float(value.double().square().sum()) for key, value in tensors.items() if MAGNITUDE in key)
    return held


def join(files: list[Held]) -> Held:
    """Return one record of several files, which are a folder's."""
    if len(files) == 1:
        return files[0]
    sizes = {f"{number}.{layer}": size for number, held in enumerate(files) for layer, size in held.sizes.items()}
    return Held({}, sizes, sum(held.magnitudes for held in files), all(held.described for held in files))


def _require_kind(path: Path, tensors: Iterable[str]) -> None:
    """Raise UserError for an adapter that is no LoRA, in whole or in part."""
    keys = list(tensors)
    layers = {match["layer"] for key in keys if (match := SIDE.match(key))}
    for mark, kind in OTHERS.items():
        if other := {key.partition(mark)[0] for key in keys if mark in key}:
            of = f" in {len(other)} of its {quantity(len(layers | other), 'layer')}" if layers - other else ""
            raise UserError(f"{path} holds a {kind}{of}, which is not read: expected a LoRA, or a DoRA in the form of "
                            "peft or diffusers; merge it into the model with the tool that made it")
    if scales := [key for key in keys if key.endswith(SCALES)]:
        raise UserError(f"{path} holds a DoRA in kohya's form ({quantity(len(scales), 'layer')} with dora_scale), "
                        "whose lengths diffusers drops: convert it to peft's form (lora_magnitude_vector), or merge "
                        "it into the model with the tool that made it")


def _size(down: Tensor, up: Tensor) -> float:
    """Return the squared norm of B A, without making it. down: [r, ...], up: [out, r, ...]."""
    a, b = down.reshape(down.shape[0], -1).double(), up.reshape(up.shape[0], -1).double()
    if b.shape[1] != a.shape[0]:  # convolutions whose up side has a kernel
        return float(a.square().sum() * b.square().sum())
    return float(((b.T @ b) * (a @ a.T)).sum())


def require_applied(path: Path, held: Held, pipe: Any, parts: dict[str, torch.nn.Module], adapter: str) -> str:
    """Return how many layers of which parts a loaded LoRA changes, in words.

    held: what its files hold. parts: modules of the pipeline, by name. Raises UserError where that is not all that the
    files hold: a loader splits a layer of several projections, but the squared norms of all changes have one sum.
    """
    from peft.tuners.lora import LoraLayer

    counts: dict[str, int] = {}
    sizes, magnitudes, ranks, scales = [], 0.0, set(), set()
    for name, part in parts.items():
        for layer in part.modules():
            if not isinstance(layer, LoraLayer) or adapter not in layer.lora_A:
                continue
            magnitude: Any = layer.lora_magnitude_vector
            scale = layer.scaling[adapter]
            counts[name] = counts.get(name, 0) + 1
            ranks.add(layer.r[adapter])
            scales.add(scale)
            matrices: Any = layer.lora_A, layer.lora_B
            down, up = (sides[adapter].weight.data for sides in matrices)
            sizes.append((1.0 if held.described else scale**2) * _size(down, up))
            if adapter in magnitude:
                magnitudes += float(magnitude[adapter].weight.detach().double().square().sum())
    if not counts:
        raise UserError(f"{path} holds no LoRA layer for {type(pipe).__name__}: {doubt(held)}")
    _require_all(path, held, type(pipe).__name__, sizes, sum(counts.values()))
    if not _near(magnitudes, held.magnitudes, WITHIN):
        raise UserError(f"{path}: the lengths of its DoRA do not reach {type(pipe).__name__} as they are: convert it "
                        "with a current diffusers, or merge it into the model")
    of = ", ".join(f"{quantity(count, 'layer')} of the {name}" for name, count in counts.items())
    return f"{path}: {'DoRA' if magnitudes else 'LoRA'} applied to {of}, rank {_range(ranks)}, scale {_range(scales)}"


def doubt(held: Held) -> str:
    """Return why none of a LoRA's layers may have been found, by the form of their names."""
    if held.sizes and all(layer.startswith(adapters.WRAPPED) for layer in held.sizes):
        return "its names are peft's: expected its adapter_config.json beside it, or a LoRA of this model"
    if held.sizes and all(layer.startswith(KOHYA) for layer in held.sizes):
        return ("its names are kohya's, which diffusers does not read for every model: convert it to diffusers' names; "
                "or was it trained on another model?")
    return "was it trained on another model?"


def _require_all(path: Path, held: Held, model: str, sizes: list[float], count: int) -> None:
    """Raise UserError where the sizes of loaded layers are not those of the files' layers."""
    total = sum(held.sizes.values())
    if count >= len(held.sizes) and _near(sum(sizes), total, WITHIN):
        return
    left = {layer: size for layer, size in held.sizes.items() if not any(_near(size, other, 0.02) for other in sizes)}
    if count < len(held.sizes) and not left:  # layers that change nothing
        left = dict(list(held.sizes.items())[count:])
    some = next(iter(left or held.sizes))
    raise UserError(f"{path}: {len(held.sizes) - len(left)} of its {quantity(len(held.sizes), 'layer')} are applied "
                    f"to {model}, and {len(left) or 'some'} are not, or at another scale, such as {some}: expected a "
                    "LoRA of this model, without parts that it lacks")


def _near(one: float, other: float, within: float) -> bool:
    return abs(one - other) <= within * max(abs(one), abs(other)) + 1e-12


def _range(values: set[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


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
        adapters.require_file(folder / LORA_FILE)
        pipe.load_lora_weights(folder, weight_name=LORA_FILE, adapter_name=adapter)
        used.append(PIPELINE)
    for name, module in modules.items():
        if (folder / name / LORA_FILE).is_file():
            adapters.require_file(folder / name / LORA_FILE)
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
        hint = unfinished(path) if not (path / "summary.json").is_file() else \
            "the run trained all weights: give a LoRA"
    raise UserError(f"{setting} is {given!r}, which has no LoRA: {hint}")


def attach(pipe: Any, modules: dict[str, torch.nn.Module], path: Path, adapter: str) -> str:
    """Load a LoRA from its file, or from a folder as `load_lora` does, as an adapter of that name.

    modules: those that may have one, by name. Returns what was applied, in words. Raises UserError if it does not
    load, or in part.
    """
    path = path.parent if path.name == adapters.WEIGHTS and path.with_name(adapters.CONFIG).is_file() else path
    files = [path, *(file for name in (LORA_FILE, adapters.WEIGHTS)
                     for file in [path / name, *sorted(path.glob(f"*/{name}"))])]
    held = join([read(file) for file in files if file.is_file()])
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
            said = f"as diffusers reads its form, the file lacks {said}; {doubt(held)}"
        why = import_failure(error) or said[:300]
        raise UserError(f"{path} does not load into {type(pipe).__name__}: {why}") from error
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    return require_applied(path, held, pipe, parts, adapter)


def _of_peft(pipe: Any, modules: dict[str, torch.nn.Module], path: Path, held: Held) -> torch.nn.Module:
    """Return the module whose layers a peft folder's LoRA has. Raises UserError if there is none."""
    names = {layer.removeprefix(adapters.WRAPPED) for layer in held.sizes}
    for module in modules.values():
        if names <= {name for name, _ in module.named_modules()}:
            return module
    raise UserError(f"{path} holds no LoRA layer for {type(pipe).__name__}: {doubt(held)}")


def tell(line: str) -> None:
    """Print a line to stderr, from the first of several processes."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def save_stock(pipe: Any, folder: Path, modules: dict[str, str]) -> None:
    """Write the format of `load_lora_weights`, by `adapters.fold_alpha`.

    modules: the component by its name in the file.
    """
    arguments: dict[str, Any] = {}
    for written, name in modules.items():
        config, arguments[f"{written}_lora_layers"] = adapters.fold_alpha(getattr(pipe, name))
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
        if INIT in adapters.adapter_configs(other):
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
        for key, value in read(file).tensors.items() if file.is_file() else ():
            _, _, rest = key.partition(".")
            yield (key if file.parent == folder else f"{file.parent.name}.{rest}"), value
    for file in (folder / adapters.WEIGHTS, *folder.glob(f"*/{adapters.WEIGHTS}")) if path.is_dir() else ():
        for key, value in tensors_of(file)[0].items() if file.is_file() else ():
            name = "model" if file.parent == folder else file.parent.name  # a language model's lies in the folder
            yield f"{name}.{key.removeprefix(adapters.WRAPPED)}", value
