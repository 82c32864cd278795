"""Loading of a diffusers pipeline, by folder, by name on the hub or from single files, and which of its parts are
denoisers.
"""

import contextlib
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from flowgrpo import hub
from flowgrpo.config.sections import Load
from flowgrpo.data import provenance
from flowgrpo.device import DTYPES
from flowgrpo.errors import UserError, nearest
from flowgrpo.files import shapes_of, tensors_of
from flowgrpo.log import quiet
from flowgrpo.methods.groups import Adapted
from flowgrpo.policies import sources
from flowgrpo.policies.pipelines import conditioned, frames, modular, prompt_inputs
from flowgrpo.policies.weights.forwards import modules_of
from flowgrpo.policies.weights.lora_files import fuse
from flowgrpo.policies.weights.low_precision import repair_zero_rows
from flowgrpo.policies.weights.memory_options import quantisation
from flowgrpo.published import MODELS
from flowgrpo.samplers.kernels import prediction
from flowgrpo.starter import FOLDERS, MERGED
from flowgrpo.types import unwrap

EXPECTED = ("a checkpoint of a whole pipeline, with load.config where diffusers infers another one; of a denoiser "
            "alone, set model to its pipeline and load.denoiser to the file")
ALL, ENCODERS, DENOISERS = "all", "encoders", "denoisers"  # of a pipeline: what is loaded
CHECKERS = ("StableDiffusionSafetyChecker", "IFSafetyChecker")  # that a pipeline can do without
TIMES = {"timestep", "timesteps", "t", "timestep_ratio"}


def _shapes(file: str) -> dict[str, torch.Tensor]:
    return {key: torch.empty(shape, device="meta") for key, (_, shape) in shapes_of(file).items()}


def pipeline(file: str, source: str, index: dict[str, Any], dtype: torch.dtype, parts: dict[str, Any]) -> Any:
    """Load a pipeline from its checkpoint.

    source: folder or hub id of its configuration, which `index` is of. Text encoders that the file lacks are read from
    a folder that has them. parts: components that are loaded already, or None.
    """
    import diffusers

    cls = getattr(diffusers, index["_class_name"])
    if not hasattr(cls, "from_single_file"):
        raise UserError(f"cannot load the model {file!r}: diffusers reads no {cls.__name__} from a single file: set "
                        f"model to {source!r}, or a folder or hub id like it, and load.denoiser to the file")
    encoders = {name: kind.from_pretrained(Path(source) / name, dtype=dtype)
                for name, kind in encoders_apart(file, source, index).items()}
    pipe = cls.from_single_file(file, config=source, dtype=dtype, **encoders, **parts)
    for name, part in modules_of(pipe).items():
        _require_complete(file, name, part)
    return pipe


def encoders_apart(file: str, source: str, index: dict[str, Any]) -> dict[str, Any]:
    """Return the classes of the text encoders whose weights the folder `source` has and the checkpoint lacks."""
    import transformers
    from diffusers.loaders.single_file_utils import is_clip_model_in_single_file, is_t5_in_single_file

    there, shapes = {}, _shapes(file)
    for name, value in index.items():
        if isinstance(value, list) and value[0] == "transformers" and any((Path(source) / name).glob("model*.safet*")):
            cls = getattr(transformers, value[1])
            t5 = "T5" in cls.__name__ and is_t5_in_single_file(shapes)
            if not t5 and not is_clip_model_in_single_file(cls, shapes):
                there[name] = cls
    return there


def denoiser(files: Load, source: str, index: dict[str, Any], names: list[str], dtype: torch.dtype
             ) -> dict[str, torch.nn.Module]:
    """Load the denoiser of a pipeline from the file of `load.denoiser`, by its name.

    source: folder or hub id of the pipeline's configuration, which `index` is of. names: of its denoisers.
    Raises UserError for a pipeline with several denoisers, and for a file that lacks some of its weights.
    """
    import diffusers

    if len(names) != 1:
        raise UserError(f"load.denoiser replaces one denoiser, but the pipeline has {len(names)}: {', '.join(names)}")
    [name] = names
    cls = getattr(diffusers, index[name][1])
    if not hasattr(cls, "from_single_file"):
        raise UserError(f"load.denoiser: diffusers reads no {cls.__name__} from a single file: leave it out")
    form = diffusers.GGUFQuantizationConfig(compute_dtype=dtype) if files.gguf else None
    file = unwrap(files.denoiser)
    with _loading(file, f"{name} of {source}", cls):
        module = cls.from_single_file(file, config=source, subfolder=name, dtype=dtype, quantization_config=form,
                                      config_revision=files.revision)
    _require_complete(file, name, module)
    return {name: module}


def vae(files: Load, source: str, index: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    """Load the autoencoder of `load.vae`, by its name in a pipeline.

    source: folder or hub id of the pipeline's configuration, which `index` is of. Raises UserError for a pipeline
    without one, and for weights of another kind.
    """
    import diffusers

    given = unwrap(files.vae)
    if "vae" not in index:
        raise UserError(f"load.vae is {given!r}, but a {index['_class_name']} has no autoencoder: leave it out")
    cls = getattr(diffusers, index["vae"][1])
    with _loading(given, f"vae of {source}", cls, "load.vae: "):
        if Path(given).is_file() and not hasattr(cls, "from_single_file"):
            module = cls.from_config(cls.load_config(source, subfolder="vae", revision=files.revision)).to(dtype)
            module.load_state_dict(tensors_of(given)[0])
        elif Path(given).is_file():
            module = cls.from_single_file(given, config=source, subfolder="vae", dtype=dtype,
                                          config_revision=files.revision)
        else:
            module = cls.from_pretrained(given, dtype=dtype)
    _require_complete(given, "vae", module)
    return {"vae": module}


@contextlib.contextmanager
def _loading(file: str, part: str, cls: type, begin: str = "") -> Iterator[None]:
    """Context manager: what reading a file of weights raises is one line. begin: of that line."""
    try:
        yield
    except Exception as error:  # third-party files can raise anything
        raise UserError(f"{begin}{file} does not load as the {part} ({' '.join(str(error).split())[:200]}): expected "
                        f"weights of a {cls.__name__}") from error


def _require_complete(file: str, name: str, module: torch.nn.Module) -> None:
    absent = [key for key, value in module.state_dict(keep_vars=True).items() if value.is_meta]
    if absent:
        raise UserError(f"{file} lacks {len(absent)} of the weights of the {name}, such as {absent[0]}: expected a "
                        "file of a model like this one")


def modality(cls: type) -> str:
    """Return the modality of a pipeline's class, "video" or "image", from the arguments of its call."""
    return "video" if frames.is_video(cls) else "image"


def index_ahead(model: str, files: Load = Load()) -> dict[str, Any]:
    """Return a model's model_index.json, with its folder as `_folder`; empty if there is none on this machine."""
    from huggingface_hub import try_to_load_from_cache

    try:
        source = config_source(model, files)
        file: Any = sources.index_file(Path(source))
        if not file.is_file() and source.count("/") == 1:
            cached = [try_to_load_from_cache(source, name, revision=files.revision) for name in sources.INDICES]
            file = next(path for path in cached if isinstance(path, str))
        return json.loads(Path(file).read_text(encoding="utf-8")) | {"_folder": str(Path(file).parent)}
    except (OSError, StopIteration, TypeError, ValueError):  # loading says what is wrong
        return {}


def skeleton(model: str, files: Load = Load()) -> tuple[Any, dict[str, torch.nn.Module]]:
    """Return the class of a model's pipeline, None for an unknown one, and its denoisers and text encoders by name,
    without values; none where their configurations are not on this machine."""
    import diffusers
    import transformers
    from accelerate import init_empty_weights

    index, modules = index_ahead(model, files), dict[str, torch.nn.Module]()
    cls = modular.class_of(index.get("_class_name") or getattr(MODELS.get(model), "pipeline", None))
    names = [*denoiser_names(index), *(name for name, value in index.items() if name.startswith("text_encoder")
                                       and isinstance(value, list) and value[0] == "transformers")]
    try:
        with quiet(), init_empty_weights():
            for name in names:
                kind, place = getattr(diffusers, index[name][1], None), {"subfolder": name}
                if kind is not None:
                    modules[name] = kind.from_config(kind.load_config(index["_folder"], **place))
                else:
                    kind = getattr(transformers, index[name][1])
                    modules[name] = kind(kind.config_class.from_pretrained(index["_folder"], **place))
    except Exception:  # of third-party files; loading says what is wrong
        return cls, {}
    return cls, modules


def rate_ahead(model: str, files: Load, call: Mapping[str, Any], fps: float | None = None) -> float:
    """Return `frames.rate` of a model by its files on this machine, `image.fps` or USUAL where they are not there."""
    index = index_ahead(model, files)
    cls = modular.class_of(index.get("_class_name"))
    if cls is None or not frames.is_video(cls):
        return fps or frames.USUAL
    denoiser = sources.described(Path(index["_folder"]) / "transformer" / "config.json")
    return frames.rate(cls, denoiser | index, call, fps)


def takes_timestep(module: torch.nn.Module) -> bool:
    """Return True for a module whose forward takes a time: a denoiser or a ControlNet."""
    return bool(TIMES & set(inspect.signature(module.forward).parameters))


def denoisers(pipe: Any) -> dict[str, torch.nn.Module]:
    """Return the modules that a pipeline's loop calls: those whose forward takes a time.

    A ControlNet only steers one.
    """
    return {name: module for name, module in sorted(modules_of(pipe).items())
            if "ControlNet" not in type(module).__name__ and takes_timestep(module)}


def text_encoders(pipe: Any) -> dict[str, torch.nn.Module]:
    """Return the modules that read a pipeline's prompts."""
    return {name: module for name, module in sorted(modules_of(pipe).items()) if name.startswith("text_encoder")}


def trainable_modules(pipe: Any, adapted: Adapted) -> dict[str, torch.nn.Module]:
    """Return the trained modules of a pipeline, by name. Raises UserError for encoders if it has none."""
    modules = denoisers(pipe) if adapted.denoisers else {}
    encoders = text_encoders(pipe) if adapted.encoders else {}
    if adapted.encoders and not encoders:
        raise UserError(f"{type(pipe).__name__} has no text encoder to be trained: set parts: {{adapted: "
                        "{encoders: false, denoisers: true}}")
    return modules | encoders


def denoiser_names(index: dict[str, Any]) -> list[str]:
    """Return the denoisers of a pipeline that is not loaded yet, by its model_index.json."""
    import diffusers

    classes = {name: getattr(diffusers, value[1], None) for name, value in index.items()
               if isinstance(value, list) and value[0] == "diffusers"}
    return [name for name, cls in classes.items() if "ControlNet" not in cls.__name__
            and TIMES & set(inspect.signature(getattr(cls, "forward", lambda: None)).parameters)]


def load_pipeline(model: str, precision: str = "fp32", trust_remote_code: bool = False, weights: str = "full",
                  files: Load = Load(), only: str = ALL, checker: bool = True) -> Any:
    """Load a diffusers pipeline: a starter's name, a directory or a hub id. UserError where it does not load.

    weights: of its denoisers, "full", or quantised as `memory_options.quantisation` says. files: where they are.
    only: ENCODERS for text encoders beside diffusers' modules without values, DENOISERS for no text encoders. checker:
    with its safety checker, which no image that is scored passes.
    """
    provenance.require_place(model)
    sources.require(model, files, weights)
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
    source = config_source(model, files)
    try:  # the hub's repository that a model is read from, in whole or for its configuration
        hub.require(source)
    except UserError as error:
        if not sources.is_file(model):
            raise
        given = "load.config names" if files.config else "diffusers infers the configuration of"
        raise UserError(f"cannot load the model {model!r}: {given} {source!r} for it ({error}): set load.config to the "
                        "folder of a pipeline like it") from None
    try:
        with quiet():  # of components in another class than the pipeline's usual one, such as a small autoencoder
            pipe = _read(model, source, files, DTYPES[precision], weights, trust_remote_code, only, checker)
            if model in MERGED and only != ENCODERS:
                _merge(pipe, MERGED[model])
            for lora in files.loras_with_scales:
                fuse(pipe, denoisers(pipe) | text_encoders(pipe), Path(lora.path), lora.scale)
            if files.scheduler:
                pipe.register_modules(scheduler=_replace_scheduler(pipe.scheduler, files.scheduler))
            if files.controlnet is not None:
                pipe = conditioned.with_controlnet(pipe, files.controlnet, DTYPES[precision])
            for inversion in files.inversions:
                conditioned.add_inversion(pipe, inversion)
            if files.ip_adapter is not None:
                conditioned.add_ip_adapter(pipe, files.ip_adapter)
    except UserError:
        raise
    except Exception as error:  # third-party files can raise anything
        expected = EXPECTED if sources.is_file(model) else \
            f"{' or '.join(FOLDERS)}, a directory with a model_index.json, or a hub id{hub.of_recipe(model)}"
        index = sources.described(Path(source) / "model_index.json")  # of no ModularPipeline
        lacking = [name for name, value in index.items()
                   if isinstance(value, list) and value[0] is not None and not (Path(source) / name).is_dir()]
        reason = f"its model_index.json names {', '.join(lacking)}, of which there is no folder" if lacking else None
        raise hub.load_error(error, model, "model", expected, reason) from error
    pipe.set_progress_bar_config(disable=True)
    prompt_inputs.watch(pipe)
    # A pipeline of a flow may come with a scheduler of another process.
    named = inspect.signature(type(pipe).__init__).parameters.get("scheduler")  # a ModularPipeline's has none
    expected = str(named and named.annotation)
    other = hasattr(pipe.scheduler, "alphas_cumprod") and prediction(pipe.scheduler) not in ("velocity", "consistency")
    if "FlowMatch" in expected and other:
        kind = expected.rpartition(".")[2].strip("'>")
        raise UserError(f"the model {model!r}: {type(pipe).__name__} is of a flow and expects a {kind}, but its "
                        f"scheduler is a {type(pipe.scheduler).__name__}: put the right one into model_index.json and "
                        "the folder scheduler")
    return pipe


def config_source(model: str, files: Load) -> str:
    """Return the folder or hub id of a model's configuration: of a checkpoint that which diffusers infers from the
    names and shapes in it, without `load.config`. Raises UserError for one that is not here or no safetensors file.
    """
    if not sources.is_file(model):
        return str(FOLDERS.get(model, model))
    from diffusers.loaders.single_file_utils import fetch_diffusers_config

    return files.config or str(fetch_diffusers_config(_shapes(model))["pretrained_model_name_or_path"])


def read_index(source: str, revision: str | None = None) -> dict[str, Any]:
    """Return the index of a pipeline in a folder or on the hub. OSError where there is none."""
    from diffusers import DiffusionPipeline, ModularPipeline

    try:
        return DiffusionPipeline.load_config(source, revision=revision)
    except OSError:
        with contextlib.suppress(OSError):
            index = dict(ModularPipeline.load_config(source, revision=revision))
            return index | {name: [*(value[:2] if value[0] else value[2]["type_hint"]), value[2]]
                            for name, value in index.items() if isinstance(value, (list, tuple)) and len(value) == 3}
        raise


def has_checker(index: dict[str, Any]) -> bool:
    """Return True for a pipeline with a safety checker, by its index."""
    value = index.get("safety_checker")
    return isinstance(value, (list, tuple)) and value[1] in CHECKERS


def _read(model: str, source: str, files: Load, dtype: torch.dtype, weights: str, trust_remote_code: bool, only: str,
          checker: bool) -> Any:
    """Read a pipeline. source: folder or hub id of its configuration."""
    from diffusers import DiffusionPipeline

    index = read_index(source, files.revision)
    # A component that the index names as absent has to be passed as None, unless its class calls it optional.
    parts: dict[str, Any] = {name: None for name, value in index.items()
                             if isinstance(value, list) and value[0] is None}
    names, whole = denoiser_names(index), sources.is_file(model)
    if has_checker(index) and not checker:
        parts |= {"safety_checker": None} | {key: False for key in index if key == "requires_safety_checker"}
    if only == DENOISERS:
        parts |= {name: None for name in index if name.startswith("text_encoder")}
    if only == ENCODERS:
        parts |= _without_values(index, source, files, dtype)
    elif files.denoiser:
        parts |= denoiser(files, source, index, names, dtype)
    if files.vae and only != ENCODERS:
        parts |= vae(files, source, index, dtype)
    if whole:
        return pipeline(model, source, index, dtype, parts)
    lower = quantisation(names, weights, dtype)
    if "_blocks_class_name" in index:
        pipe = modular.load(source, dtype, trust_remote_code, files, parts, lower.quant_mapping if lower else {})
    else:
        pipe = DiffusionPipeline.from_pretrained(source, dtype=dtype, quantization_config=lower, variant=files.variant,
                                                 revision=files.revision, trust_remote_code=trust_remote_code, **parts)
    if weights == "fp8":
        for module in denoisers(pipe).values():
            repair_zero_rows(module)
    return pipe


def _without_values(index: dict[str, Any], source: str, files: Load, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    """Return the modules of diffusers in a pipeline's index, by name, on the meta device."""
    import diffusers
    from accelerate import init_empty_weights

    modules = {}
    for name, value in index.items():
        kind: Any = getattr(diffusers, value[1], None) if isinstance(value, list) and value[0] == "diffusers" else None
        if torch.nn.Module in getattr(kind, "__mro__", ()):
            with init_empty_weights():
                modules[name] = kind.from_config(kind.load_config(source, subfolder=name, revision=files.revision))
            modules[name] = modules[name].to(dtype)
    return modules


def _replace_scheduler(scheduler: Any, keys: Mapping[str, Any]) -> Any:
    """Return a scheduler with other keys of its configuration, and of another class if `class` is among them.

    Raises UserError for what diffusers does not know.
    """
    import diffusers

    name = keys.get("class", type(scheduler).__name__)
    cls: Any = getattr(diffusers, str(name), None)
    if not hasattr(cls, "set_timesteps"):
        raise UserError(f"load.scheduler: class is {name!r}, expected a scheduler of diffusers, such as LCMScheduler")
    known = [*inspect.signature(cls.__init__).parameters][1:]
    for key in keys:
        if key != "class" and key not in known:
            raise UserError(f"load.scheduler: {name} has no {key!r}{nearest(key, known)}")
    return cls.from_config(dict(scheduler.config) | {key: value for key, value in keys.items() if key != "class"})


def _merge(pipe: Any, folder: Path) -> None:
    """Add the folder's LoRA to the denoiser's weights for good, and take the scheduler that lies beside it."""
    import diffusers

    pipe.load_lora_weights(folder)
    pipe.fuse_lora(list(denoisers(pipe)))
    pipe.unload_lora_weights()
    described = json.loads((folder / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
    pipe.register_modules(scheduler=getattr(diffusers, described["_class_name"]).from_config(described))
