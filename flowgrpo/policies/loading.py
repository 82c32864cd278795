"""Stock pipelines with saved weights: loaded on a device, and tuned by a run, its checkpoint or any LoRA, whose headers
are compared with the model's files before the model is loaded.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Load, Memory
from flowgrpo.device import concrete, ran_out
from flowgrpo.errors import UserError
from flowgrpo.files import shapes_of
from flowgrpo.log import quiet
from flowgrpo.policies import checkpoints, sources
from flowgrpo.policies.pipelines import edits
from flowgrpo.policies.pipelines.call import class_on_device
from flowgrpo.policies.pipelines.load import denoisers, load_pipeline, text_encoders
from flowgrpo.policies.pipelines.rlg import Branches
from flowgrpo.policies.weights import adapters, memory_options
from flowgrpo.policies.weights.lora_files import LORA_FILE, attach, lora_parts, read, tell
from flowgrpo.starter import FOLDERS
from flowgrpo.storage.places import STATE, is_checkpoint, unfinished

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3")  # others are packed, and have other shapes


def describe_base_model(path: Path) -> str:
    """The model that a run's weights were trained on, as the end of a message; empty for other weights."""
    config = checkpoints.config_of(path.parent if path.is_file() else path)
    return "" if config is None else f"; its run was trained on {config.model!r}"


def require_fit(model: str, path: Path, files: Load = Load()) -> None:
    """Raise UserError for a run's LoRA of layers that a pipeline's folder lacks, or has in another size.

    files: where else the model's weights are. What cannot be read without loading the model is left to that.
    """
    folder, origin = Path(FOLDERS.get(model, model)), describe_base_model(path)
    assembled = any((files.denoiser, files.vae, files.lora, files.controlnet, files.ip_adapter,
                     files.textual_inversion))
    if not origin or sources.is_file(model) or assembled or not sources.index_file(folder).is_file():
        return
    # Read shapes from the headers only: a checkpoint, a file, or the LoRA of a run.
    file = path / STATE if is_checkpoint(path) else path if path.is_file() else path / LORA_FILE
    if not file.is_file() or file.suffix != ".safetensors":  # weights in another form
        return
    shapes = {key.removeprefix("weights/").replace(".default.weight", ".weight"): shape
              for key, (_, shape) in shapes_of(file).items() if not key.startswith(("ema/", "optimizer/"))}
    ups = {key.removesuffix(".lora_B.weight"): shape for key, shape in shapes.items() if key.endswith(".lora_B.weight")}
    known: dict[str, dict[str, tuple[str, list[int]]]] = {}
    # Compare every layer with the folder's weights. Quantised ones have other shapes, and are left to loading.
    for layer, up in ups.items():
        if f"{layer}.lora_A.weight" not in shapes or "/" in layer:
            continue
        inner, outer = shapes[f"{layer}.lora_A.weight"][1], up[0]
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


@contextlib.contextmanager
def memory_told() -> Iterator[None]:
    """Context manager and decorator: report a device's lack of memory in one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UserError(f"out of memory ({why}): set memory.weights, memory.encoders or "
                        "memory.vae in the config.yaml of a pipeline's run, free the device, or use the CPU "
                        "(CUDA_VISIBLE_DEVICES=-1)") from error


def place(device: torch.device | None = None) -> torch.device:
    """Device that pipelines draw on: a GPU, by default the first, or the CPU if there is none."""
    return torch.device(device or "cuda") if torch.cuda.is_available() else torch.device("cpu")


def make_pipeline(model: str, precision: str, trust_remote_code: bool = False, device: torch.device | None = None,
                  memory: Memory = Memory(), files: Load = Load()) -> Any:
    """Load the pipeline on a GPU (by default the first) or on the CPU.

    precision: `auto` takes the device's default.
    files: where the model's weights are.
    memory: as in a run: storage and place of weights, decoding. A LoRA that is loaded later comes with its block. 4-bit
    weights need a GPU and are loaded in full on the CPU.
    Raises UserError if a required package is absent.
    """
    device = place(device)
    weights = "full" if memory.weights == "nf4" and device.type != "cuda" else memory.weights
    if weights != "full":
        memory_options.require_package(f"memory.weights is {weights!r}", memory_options.PACKAGES[weights])
    pipe = load_pipeline(model, concrete(precision, device), trust_remote_code, weights, files, checker=False)
    away = None if memory.encoders == "keep" else "cpu"
    modules = denoisers(pipe)
    encoders = memory_options.Encoders(pipe, device, away, modules if memory_options.later(memory) else ())
    if away is not None:
        encoders.attend(pipe, on_cpu=memory.encoders == "ahead")
        pipe.__class__ = class_on_device(type(pipe), device)  # diffusers takes the place of a part that may be away
    if memory_options.later(memory):
        for module in modules.values():
            module.requires_grad_(False)
        memory_options.place(modules.values(), encoders, device, memory)
    memory_options.decode_in_parts(pipe, memory.vae)
    return pipe


def files_of(config: Config | None, model: str) -> Load:
    """The `load` settings with which a run loaded its model; the defaults for another model."""
    return config.load if config is not None and config.model == model else Load()


def load_tuned(pipe: Any, path: Path, told: bool = True) -> None:
    """Load a run's result, its checkpoint, or any LoRA, into a stock pipeline.

    told: print what of a LoRA of others was applied. Raises UserError if there is none, or none that fits.
    """
    modules = denoisers(pipe) | text_encoders(pipe)
    trained = [name for name in modules if path.is_dir() and (path / name / "config.json").is_file()]
    if checkpoints.is_checkpoint(path):
        _load_checkpoint(pipe, path)
    elif checkpoints.holds_edits(path):
        config = checkpoints.config_of(path)
        edits.over(pipe, path, config.call if config else {}).attach()
    elif path.is_file() or (path / LORA_FILE).is_file() or (path / adapters.CONFIG).is_file() or any(
            (path / name / adapters.CONFIG).is_file() for name in modules):
        with _translate_errors(path, pipe):
            applied = attach(pipe, modules, path, "default")
        if told and checkpoints.config_of(path) is None:  # of others, whose files come in many forms
            tell(applied)
    elif trained:
        for name in trained:
            module = getattr(pipe, name)
            with _translate_errors(path / name, pipe):
                tuned = type(module).from_pretrained(path / name, dtype=module.dtype).to(module.device)
                pipe.register_modules(**{name: tuned})
    else:
        require_weights(path)
        raise UserError(f"{path} holds no weights of {type(pipe).__name__}: was it trained on another model?")


def load_branches(pipe: Any, path: Path) -> Branches:
    """Load weights as `load_tuned` does, and keep the base for RLG. Raises UserError for an edit policy."""
    if checkpoints.holds_edits(path):
        raise UserError(f"--rlg: {path} holds an edit policy, which leaves the denoiser as it is: leave --rlg out")
    first = denoisers(pipe)
    load_tuned(pipe, path)
    return Branches(pipe, first)


def require_weights(path: Path) -> None:
    """Raise UserError, before anything is drawn, if a path has no weights, or a LoRA that is damaged."""
    known = any((path / name).is_file() for name in (LORA_FILE, edits.FILE))
    if path.is_file() or checkpoints.is_checkpoint(path) or known or (path / adapters.CONFIG).is_file() or any(
            file for name in (adapters.CONFIG, "config.json") for file in path.glob(f"*/{name}")):
        for file in lora_parts(path) if path.name != edits.FILE else ():
            read(file)
        return
    hint = unfinished(path) if (path / "config.yaml").is_file() else \
        "expected a finished run, a folder with a LoRA, or its file"
    raise UserError(f"no weights at {path} ({LORA_FILE} is missing): {hint}")


def _load_checkpoint(pipe: Any, path: Path) -> None:
    """Load a checkpoint's weights as a finished run's are loaded, so that equal weights draw equal images: a LoRA is
    trained in fp32, and stock diffusers loads it in the precision of its module."""
    modules = denoisers(pipe) | text_encoders(pipe)
    precisions = {f"{name}.{key}": value.dtype for name, module in modules.items()
                  for key, value in module.named_parameters()}
    weights = checkpoints.load(pipe, path)
    if checkpoints.holds_edits(path):
        return
    if not weights.adapter.rank:
        for key, parameter in weights.named.items():
            parameter.data = parameter.data.to(precisions[key])
        return
    with tempfile.TemporaryDirectory() as folder:
        weights.save(Path(folder))
        for module in weights.modules.values():
            adapters.remove(module)
        load_tuned(pipe, Path(folder), told=False)


@contextlib.contextmanager
def _translate_errors(path: Path, pipe: Any) -> Iterator[None]:
    """Context manager: turn diffusers' errors on weights into one line, without its log."""
    try:
        with quiet():
            yield
    except UserError as error:
        raise UserError(f"{error}{describe_base_model(path)}") from error
    except Exception as error:
        raise UserError(f"{path} does not load into {type(pipe).__name__}: {' '.join(str(error).split())[:200]}"
                        f"{describe_base_model(path)}") from None
