"""LoRA files of a pipeline: the format that stock diffusers loads, or peft's if it has no loader for a denoiser.

Loaders of diffusers read many forms and drop in silence what they do not know: a kohya file's DoRA, an alpha that some
layers lack, layers of a part that the pipeline does not have. So one reader of all commands proves that what a file
holds is what a pipeline got.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowgrpo.config.sections import Adapter
from flowgrpo.errors import UserError
from flowgrpo.files import tensors_of
from flowgrpo.log import quiet
from flowgrpo.nouns import quantity
from flowgrpo.packages import import_failure
from flowgrpo.policies.weights import adapters
from flowgrpo.policies.weights.forwards import modules_of
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
LEAST = 1e-12  # of |B A|^2: what is below is no change
SIZES = re.compile(r"size mismatch for (\S+): .*?torch\.Size\((\[.*?\])\).*?torch\.Size\((\[.*?\])\)")  # torch's own
LORA_FILE = "pytorch_lora_weights.safetensors"
INIT, LIVE = "init", "default"  # adapters: the LoRA from which a run starts while it is read, and the trained one
ENCODER, INNER = "text_encoder", "text_model."  # beginnings of the names of parts, and of some layers of them
PART = re.compile(r"unet|prior|decoder|model|(unconditional_)?transformer|(transformer|text_encoder)(_\d)?")
PIPELINE = "load_lora_weights"
EXPERT = "load_lora_weights(load_into_transformer_2=True)"
PEFT = "peft.inject_adapter_in_model"


@dataclass
class Held:
    """LoRA of one file or of several: its tensors, and what its layers change.

    sizes: of each layer, the squared norm of scale * B A; without the scale where metadata state it. described: whether
    they do. alphas: that layers have. magnitudes: of a DoRA, the sum of squares. changed: tensors differ from the
    file's.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    alphas: set[float] = field(default_factory=set)
    magnitudes: float = 0.0
    described: bool = False
    changed: bool = False


def read(path: Path) -> Held:
    """Read a LoRA's file.

    A layer without an alpha has the scale 1, as in kohya's scripts, also where others have one. Where alphas differ,
    or stand beside peft's names, they are multiplied into the weights: diffusers mixes them up, or refuses them. A file
    of kohya's without alphas gets those of the scale 1.

    Raises UserError for another kind of adapter, a DoRA of kohya's form, a layer without one of its sides or of rank 0,
    and for values that are not finite.
    """
    tensors, metadata = tensors_of(path)
    _require_kind(path, tensors)
    adapters.require_read(path, tensors)
    said = adapters.said_of(path, metadata)
    held = Held(dict(tensors), described=bool(said) or adapters.METADATA in metadata)
    # Both sides of every layer, and its scale.
    sides: dict[str, dict[str, str]] = {}
    for key in tensors:
        if match := SIDE.match(key):
            sides.setdefault(match["layer"], {})["down" if match["side"] in ("A", "down") else "up"] = key
    scales, alphas = dict[str, float](), set[float | None]()
    for layer, of in sides.items():
        if len(of) < 2:
            raise UserError(f"{path}: a LoRA with {next(iter(of.values()))}, but without its other side: expected both "
                            "sides of every layer")
        rank, alpha = tensors[of["down"]].shape[0], tensors.get(layer + ALPHA)
        if not tensors[of["down"]].numel() or not tensors[of["up"]].numel():
            raise UserError(f"{path}: the layer {layer} has rank {rank} and no values, expected a rank of 1 or more")
        if alpha is not None and alpha.numel() != 1:
            raise UserError(f"{path}: {layer}{ALPHA} holds {alpha.numel()} values, expected one number")
        alphas.add(None if alpha is None else float(alpha))
        scales[layer] = 1.0 if held.described or alpha is None else float(alpha) / rank
        held.sizes[layer] = scales[layer]**2 * _size(tensors[of["down"]], tensors[of["up"]])
    # What diffusers would not read as it is: alphas that differ, and files of kohya's without any.
    held.alphas = {value for key, value in said.items() if key.endswith("lora_alpha")} if held.described else {
        scale * tensors[sides[layer]["down"]].shape[0] for layer, scale in scales.items()}
    peft = any(".lora_B" in of["up"] for of in sides.values())  # beside its names diffusers reads no alpha
    if not held.described and (len(alphas) > 1 or peft and alphas != {None}):
        held.changed = True
        for layer, of in sides.items():
            up = tensors[of["up"]]
            held.tensors[of["up"]] = up if scales[layer] == 1 else up.float() * scales[layer]
            held.tensors.pop(layer + ALPHA, None)
    if lacking := {layer + ALPHA: torch.tensor(float(tensors[of["down"]].shape[0])) for layer, of in sides.items()
                   if ".lora_down." in of["down"] and layer.startswith(KOHYA) and layer + ALPHA not in held.tensors}:
        held.changed = True  # some of diffusers' converters read no file of kohya's without it
        held.tensors |= lacking
    held.magnitudes = sum(float(value.double().square().sum()) for key, value in tensors.items() if MAGNITUDE in key)
    return held


def join(files: list[Held]) -> Held:
    if len(files) == 1:
        return files[0]
    sizes = {f"{number}.{layer}": size for number, held in enumerate(files) for layer, size in held.sizes.items()}
    return Held({}, sizes, set(), sum(held.magnitudes for held in files), all(held.described for held in files))


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
    """Squared norm of B A, without making it. down: [r, ...], up: [out, r, ...]."""
    a, b = down.reshape(down.shape[0], -1).double(), up.reshape(up.shape[0], -1).double()
    if b.shape[1] != a.shape[0]:  # convolutions whose up side has a kernel
        return float(a.square().sum() * b.square().sum())
    return float(((b.T @ b) * (a @ a.T)).sum())


def require_applied(path: Path, held: Held, pipe: Any, adapter: str) -> str:
    """Number of layers that a loaded LoRA changes in each part of a pipeline, in words.

    held: what its files hold. Raises UserError where that is not all that the files hold: a loader splits a layer of
    several projections, but the squared norms of all changes have one sum.
    """
    counts = Counter[str]()
    sizes, magnitudes, ranks, scales = [], 0.0, set(), set()
    for name, part in modules_of(pipe).items():
        layers: list[Any] = [layer for layer in adapters.lora_layers(part).values() if adapter in layer.lora_A]
        counts += Counter({name: len(layers)})
        for layer in layers:
            scale = layer.scaling[adapter]
            ranks.add(layer.r[adapter])
            scales.add(scale)
            size = _size(layer.lora_A[adapter].weight.data, layer.lora_B[adapter].weight.data)
            sizes.append(size if held.described else scale**2 * size)
            if adapter in layer.lora_magnitude_vector:
                length = layer.lora_magnitude_vector[adapter].weight
                magnitudes += float(length.detach().double().square().sum())
    if not counts:
        raise UserError(f"{path} holds no LoRA layer for {type(pipe).__name__}: {doubt(held)}")
    # Loaders drop what they do not know without an error: compare sums of squares with the files'.
    _require_all(path, held, type(pipe).__name__, sizes, sum(counts.values()))
    if not math.isclose(magnitudes, held.magnitudes, rel_tol=WITHIN, abs_tol=LEAST):
        raise UserError(f"{path}: the lengths of its DoRA do not reach {type(pipe).__name__} as they are: convert it "
                        "with a current diffusers, or merge it into the model")
    of = ", ".join(f"{quantity(count, 'layer')} of the {name}" for name, count in counts.items())
    return f"{path}: {'DoRA' if magnitudes else 'LoRA'} applied to {of}, rank {_range(ranks)}, scale {_range(scales)}"


def doubt(held: Held) -> str:
    """Why none of a LoRA's layers may have been found, by the form of their names."""
    if held.sizes and all(layer.startswith(adapters.WRAPPED) for layer in held.sizes):
        return "its names are peft's: expected its adapter_config.json beside it, or a LoRA of this model"
    if held.sizes and all(layer.startswith(KOHYA) for layer in held.sizes):
        return ("its names are kohya's, which diffusers does not read for every model: convert it to diffusers' names; "
                "or was it trained on another model?")
    return "was it trained on another model?"


def _require_all(path: Path, held: Held, model: str, sizes: list[float], count: int) -> None:
    """Raise UserError where the sizes of loaded layers are not those of the files' layers."""
    total = sum(held.sizes.values())
    if count >= len(held.sizes) and math.isclose(sum(sizes), total, rel_tol=WITHIN, abs_tol=LEAST):
        return
    left = {layer: size for layer, size in held.sizes.items()
            if not any(math.isclose(size, other, rel_tol=2 * WITHIN, abs_tol=LEAST) for other in sizes)}
    if count < len(held.sizes) and not left:  # layers that change nothing
        left = dict(list(held.sizes.items())[count:])
    some = next(iter(left or held.sizes))
    raise UserError(f"{path}: {len(held.sizes) - len(left)} of its {quantity(len(held.sizes), 'layer')} are applied "
                    f"to {model}, and {len(left) or 'some'} are not, or at another scale, such as {some}: expected a "
                    "LoRA of this model, without parts that it lacks")


def _range(values: set[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def loader(pipe: Any, name: str) -> str:
    """Loader of a LoRA of the denoiser or text encoder `name` of a stock pipeline: PIPELINE, EXPERT (Wan 2.2) or
    PEFT."""
    writes = inspect.signature(getattr(pipe, "save_lora_weights", lambda: None)).parameters
    if not name.startswith("text_encoder") and not hasattr(getattr(pipe, name), "load_lora_adapter"):
        return PEFT
    if "text_encoder_2_lora_layers" in writes and not hasattr(pipe, "text_encoder_2"):
        return PEFT  # Kolors' further pipelines have SDXL's loader, which reads a part that they lack
    if f"{name}_lora_layers" in writes and f"{name}_lora_adapter_metadata" in writes:
        return PIPELINE
    second = name == "transformer_2" and name in getattr(pipe, "_lora_loadable_modules", ())
    return EXPERT if second and "transformer_lora_layers" in writes else PEFT


def load_lora(pipe: Any, modules: dict[str, torch.nn.Module], folder: Path, adapter: str = "default") -> list[str]:
    """Load the LoRA that `Weights.save` wrote into a stock pipeline; return the loaders used, none without a LoRA.

    modules: those of the pipeline that may have one, by name. Raises UserError as `read`.
    """
    used = []
    if (folder / LORA_FILE).is_file():
        read(folder / LORA_FILE)
        pipe.load_lora_weights(folder, weight_name=LORA_FILE, adapter_name=adapter)
        used.append(PIPELINE)
    for name, module in modules.items():
        if (folder / name / LORA_FILE).is_file():
            read(folder / name / LORA_FILE)
            pipe.load_lora_weights(folder / name, weight_name=LORA_FILE, adapter_name=adapter,
                                   load_into_transformer_2=True)
            used.append(EXPERT)
        elif (folder / name / adapters.CONFIG).is_file():
            adapters.load(module, folder / name, adapter)
            used.append(PEFT)
    return used


def below(folder: Path, name: str) -> list[Path]:
    """Files of this name in the folders of parts; others, such as of a LoRA that a run began from, are not the folder's
    own."""
    return [file for file in sorted(folder.glob(f"*/{name}")) if PART.fullmatch(file.parent.name)]


def lora_parts(path: Path) -> list[Path]:
    """Files of a LoRA: the path itself, or those in a folder and in the folders of its parts."""
    if path.is_file():
        return [path]
    return [file for name in (LORA_FILE, adapters.WEIGHTS) for file in (path / name, *below(path, name))
            if file.is_file()]


def require_lora(setting: str, given: str) -> None:
    """Raise UserError if a path is neither a LoRA's file nor a folder with one, or is damaged. setting: what names it.
    """
    path = Path(given)
    if (files := lora_parts(path)) and all(file.suffix == ".safetensors" for file in files):
        for file in files:
            read(file)
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
    held = join([read(file) for file in lora_parts(path)])
    try:
        with quiet():  # a second adapter, and none for the text encoders, are intended
            if path.is_file():
                given = {"pretrained_model_name_or_path_or_dict": held.tensors} if held.changed else {
                    "pretrained_model_name_or_path_or_dict": path.parent, "weight_name": path.name}
                pipe.load_lora_weights(**given, adapter_name=adapter)
            elif (path / adapters.CONFIG).is_file():
                names = {layer.removeprefix(adapters.WRAPPED) for layer in held.sizes}
                owner = next((module for module in modules.values()
                              if names <= {name for name, _ in module.named_modules()}), None)
                if owner is None:
                    raise UserError(f"{path} holds no LoRA layer for {type(pipe).__name__}: {doubt(held)}")
                adapters.load(owner, path, adapter)
            else:
                load_lora(pipe, modules, path, adapter)
    except UserError:
        raise
    except Exception as error:  # third-party files can raise anything
        raise _unread(path, type(pipe), held, error) from error
    return require_applied(path, held, pipe, adapter)


def _unread(path: Path, cls: Any, held: Held, error: Exception) -> UserError:
    said = " ".join(str(error).split())
    if sizes := SIZES.search(said):
        said = f"size mismatch for {sizes[1]}, {sizes[2]} in the file and {sizes[3]} in the model"
    if isinstance(error, KeyError):  # of a converter that expects all layers
        said = f"as diffusers reads its form, the file lacks {said}; {doubt(held)}"
    return UserError(f"{path} does not load into {cls.__name__}: {import_failure(error) or said[:300]}")


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
    tell(f"load.lora {attach(pipe, modules, path, 'default')}")
    for module in modules.values():
        for layer in adapters.lora_layers(module).values():
            layer.scale_layer(scale)
        adapters.merge(module)


# --- a LoRA from which a run starts ----------------------------------------------------------------------------------

@dataclass(frozen=True)
class Start:
    """LoRA from which a run starts: the rank of each of its layers, by part and name; the alpha of all, None where they
    differ; and whether it is a DoRA."""

    ranks: dict[str, int]
    alpha: float | None
    dora: bool


def ends(key: str, target: str) -> bool:
    return key == target or key.endswith(f".{target}")


def layer_names(module: torch.nn.Module) -> list[str]:
    """Layers of a module that can have a LoRA, or have one."""
    return [key.removesuffix(".base_layer") for key, part in module.named_modules()
            if isinstance(part, (torch.nn.Linear, torch.nn.Conv2d)) and ".lora_" not in key]


def start_of(path: Path, cls: Any, modules: Mapping[str, torch.nn.Module]) -> Start | None:
    """Ranks, alpha and DoRA of a LoRA's files by diffusers' layer names; None where these need the model.

    cls: of the pipeline. modules: its denoisers and text encoders, which need no values; none where they are not known.
    Raises UserError as `read`, and where diffusers does not read the files' form.
    """
    # Ranks of the layers by the names of the files, which a converter of the pipeline's class may change.
    ranks, alphas, dora = dict[str, int](), set[float](), False
    for file in lora_parts(path):
        held, part = read(file), "" if path in (file, file.parent) else file.parent.name
        state, alphas, dora = held.tensors, alphas | held.alphas, dora or held.magnitudes > 0
        if file.name != adapters.WEIGHTS and hasattr(cls, "lora_state_dict"):
            from diffusers.utils import convert_state_dict_to_diffusers, convert_unet_state_dict_to_peft

            unet: Any = modules.get("unet")  # by whose layers SDXL's blocks are numbered
            try:
                with quiet():
                    converted = cls.lora_state_dict(dict(state), **({"unet_config": unet.config} if unet else {}))
            except Exception as error:  # third-party files can raise anything
                raise _unread(path, cls, held, error) from error
            state = converted[0] if isinstance(converted, tuple) else converted
            # Loaders rename the layers of kohya's files for a U-Net and for CLIP in a second step.
            encoders = {key: value for key, value in state.items() if key.startswith(ENCODER)}
            others = {key: value for key, value in state.items() if key not in encoders}
            if "lora_A" not in next(iter(others), "lora_A"):
                others = convert_unet_state_dict_to_peft(others)
            state = (encoders and convert_state_dict_to_diffusers(encoders)) | others
        names = {match["layer"].removeprefix(adapters.WRAPPED): tensor.shape[0] for key, tensor in state.items()
                 if (match := SIDE.match(key)) and match["side"] in ("A", "down")}
        if file.name == adapters.WEIGHTS:
            part = part or next((name for name, module in modules.items()
                                 if names.keys() <= {*layer_names(module)}), "model")
            names = {f"{part}.{name}": rank for name, rank in names.items()}
        ranks |= {f"{part}.{name.partition('.')[2]}" if part else name: rank for name, rank in names.items()}
    # Match the names with the layers that are there; one that is nowhere means that the model has to tell.
    known = {part: {*layer_names(module)} for part, module in modules.items()}
    found: dict[str, int] = {}
    for name, rank in ranks.items():  # by the name in its part, which some versions of transformers begin with INNER
        part, _, layer = name.partition(".")
        names_there = [f"{part}.{each}" for each in (layer, layer.removeprefix(INNER), INNER + layer)
                       if each in known.get(part, ())] if known else [name] * bool(PART.fullmatch(part))
        if not names_there:
            return None
        found[names_there[0]] = rank
    return Start(found, alphas.pop() if len(alphas) == 1 else None, dora) if found else None


def targets_for(layers: Iterable[str], others: Iterable[str]) -> list[str]:
    """Shortest targets that name all of these layers and none of the others."""
    def endings(key: str) -> list[str]:  # the shortest first
        return [".".join(key.split(".")[-count:]) for count in range(1, key.count(".") + 2)]

    taken = {end for key in others for end in endings(key)}
    return sorted({next((end for end in endings(layer) if end not in taken and not end.partition(".")[0].isdigit()),
                        layer) for layer in layers})


def require_start(setting: str, path: Path, start: Start, adapter: Adapter, trained: Iterable[str],
                  modules: Mapping[str, torch.nn.Module], ranks: bool = True) -> None:
    """Raise UserError with all that the LoRA of a path and the trained one differ in, and the settings that mend it.

    setting: the key that names the path. trained: parts that the run trains. modules: by part; those that are not known
    are not compared. ranks: compare these, and the form, too.
    """
    trained, by_part = [*trained], dict[str, set[str]]()
    for name in start.ranks:
        part, _, layer = name.partition(".")
        by_part.setdefault(part, set()).add(layer)
    said, sizes = [], sorted(set(start.ranks.values()))
    if ranks and sizes != [adapter.rank]:
        said.append(f"has rank {' and '.join(map(str, sizes))}, expected adapter.rank {adapter.rank}")
    if ranks and start.dora != adapter.dora:
        said.append(f"is {'a' if start.dora else 'no'} DoRA, expected adapter.dora {str(start.dora).lower()}")
    if further := [part for part in by_part if part not in trained]:
        said.append(f"is also of the {' and '.join(further)}, but the run trains {' and '.join(trained)}")
    if lacking := [part for part in trained if part not in by_part]:
        said.append(f"is not of the {' and '.join(lacking)}, which the run trains")
    # One layer that differs is named for each part: more would hide the setting that mends them all.
    for part in (part for part in trained if part in by_part and part in modules):
        option = "encoder_targets" if part.startswith(ENCODER) else "targets"
        there = layer_names(modules[part])
        wanted = {key for key in there if any(ends(key, target) for target in getattr(adapter, option))}
        if beyond := sorted(by_part[part] - wanted):
            said.append(f"has a layer {part}.{beyond[0]}, which adapter.{option} do not name")
        elif absent := sorted(wanted - by_part[part]):
            said.append(f"has no layer {part}.{absent[0]}, which adapter.{option} do name")
    if said:
        raise UserError(f"{setting} {path}: its LoRA {'; it '.join(said)}: "
                        f"{_settings(start, by_part, modules, adapter if ranks else None)}")


def _settings(start: Start, by_part: dict[str, set[str]], modules: Mapping[str, torch.nn.Module],
              adapter: Adapter | None) -> str:
    """Settings of a run that can start from a LoRA, or why none can. adapter: None for targets alone."""
    sizes = sorted(set(start.ranks.values()))
    encoders = [part for part in by_part if part.startswith(ENCODER)]
    untouched = [part for part in modules if part.startswith(ENCODER) and part not in by_part]
    why = f"all layers of a run have one rank, but these have {' and '.join(map(str, sizes))}" if len(sizes) > 1 else \
        f"a run trains all text encoders or none, but it has no {untouched[0]}" if encoders and untouched else \
        "a run's DoRA is of denoisers" if start.dora and encoders else ""
    if why and adapter:
        return f"{why}: no run starts from it; fuse it into the model by load.lora, and train another one"
    given: dict[str, object] = {}
    if adapter:
        given = {"adapter.rank": sizes[0]} | ({"adapter.alpha": f"{start.alpha:g}"} if (start.alpha or 0) > 0 else {})
        given |= {"adapter.dora": str(start.dora).lower()} if start.dora or adapter.dora else {}
    for option, parts in (("targets", by_part.keys() - encoders), ("encoder_targets", encoders)):
        layers = {key for part in parts for key in by_part[part]}
        others = {key for part in parts if part in modules for key in layer_names(modules[part])} - layers
        given |= {f"adapter.{option}": f"[{','.join(targets_for(layers, others))}]"} if layers else {}
    if encoders:
        given |= {"parts.adapted.encoders": "true"} | (
            {"parts.adapted.denoisers": "false"} if len(encoders) == len(by_part) else {})
    return "set " + " ".join(f"--{key}={value}" for key, value in given.items())


@torch.no_grad()
def initial_values(path: Path, named: dict[str, torch.nn.Parameter], layers: dict[str, LoraLayer]
                   ) -> dict[str, torch.Tensor]:
    """The LoRA's values by the names of the trained parameters, which act with the live scale as with its own.

    They come from the files where these have the names that `save` writes: loaded layers are in the model's precision.
    """
    loaded = {f"{key}.{part}.{LIVE}.weight": getattr(layer, part)[INIT].weight.data.clone()
              for key, layer in layers.items() for part in ("lora_A", "lora_B", "lora_magnitude_vector")
              if INIT in getattr(layer, part)}
    exact: dict[str, torch.Tensor] = {}
    for file in lora_parts(path):
        part = "" if path in (file, file.parent) else file.parent.name
        if file.name == adapters.WEIGHTS and file != path:  # a language model's lies in the folder
            exact |= {f"{part or 'model'}.{key.removeprefix(adapters.WRAPPED)}": value
                      for key, value in tensors_of(file)[0].items()}
        else:
            exact |= {f"{part}.{key.partition('.')[2]}" if part else key: value
                      for key, value in read(file).tensors.items()}
    values = {key: exact.get(key.replace(f".{LIVE}", ""), loaded[key]) for key in named if key in loaded}
    for key, layer in layers.items():
        own, live, up = layer.scaling[INIT], layer.scaling[LIVE], f"{key}.lora_B.{LIVE}.weight"
        if own != live:
            values[up] = values[up] * own / live
    return values


def whole_values(path: Path, named: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Values of all weights in a model's folder, or in a run's that trained them.

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
