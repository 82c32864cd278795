"""Weights from single files: a pipeline's checkpoint, or a denoiser in place of a pipeline's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flowgrpo.config.sections import Load
from flowgrpo.errors import UserError
from flowgrpo.files import tensors_of
from flowgrpo.types import required

EXPECTED = ("a checkpoint of a whole pipeline, with load.config where diffusers infers another one; of a denoiser "
            "alone, set model to its pipeline and load.denoiser to the file")


def inferred(file: str) -> str:
    """Return the hub id of the pipeline that diffusers infers from the names and shapes in a checkpoint.

    Raises UserError for a file that is no safetensors file.
    """
    from diffusers.loaders.single_file_utils import fetch_diffusers_config

    return str(fetch_diffusers_config(_shapes(file))["pretrained_model_name_or_path"])


def _shapes(file: str) -> dict[str, torch.Tensor]:
    """Return tensors of a safetensors file by name, with their shapes and without their values."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            return {key: torch.empty(opened.get_slice(key).get_shape(), device="meta")
                    for key in opened.keys()}  # noqa: SIM118, not a dictionary
    except SafetensorError as error:
        raise UserError(f"cannot read {file} ({error}): expected a .safetensors file") from None


def pipeline(file: str, source: str, index: dict[str, Any], dtype: torch.dtype, parts: dict[str, Any]) -> Any:
    """Load a pipeline from its checkpoint.

    source: folder or hub id of its configuration, which `index` is of. Text encoders that the file lacks are read from
    a folder that has them. parts: components that are loaded already, or None.
    """
    import diffusers

    cls = getattr(diffusers, index["_class_name"])
    if not hasattr(cls, "from_single_file"):
        raise UserError(f"cannot load the model {file!r}: diffusers reads no {cls.__name__} from a single file, "
                        "expected a pipeline's folder or a hub id")
    pipe = cls.from_single_file(file, config=source, dtype=dtype, **_encoders(file, source, index, dtype), **parts)
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            _require_complete(file, name, part)
    return pipe


def _encoders(file: str, source: str, index: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    """Load the text encoders whose weights the folder `source` has and the checkpoint lacks."""
    import transformers
    from diffusers.loaders.single_file_utils import is_clip_model_in_single_file, is_t5_in_single_file

    parts, shapes = {}, _shapes(file)
    for name, value in index.items():
        if isinstance(value, list) and value[0] == "transformers" and any((Path(source) / name).glob("model*.safet*")):
            cls = getattr(transformers, value[1])
            t5 = "T5" in cls.__name__ and is_t5_in_single_file(shapes)
            if not t5 and not is_clip_model_in_single_file(cls, shapes):
                parts[name] = cls.from_pretrained(Path(source) / name, dtype=dtype)
    return parts


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
    file = required(files.denoiser)
    try:
        module = cls.from_single_file(file, config=source, subfolder=name, dtype=dtype, quantization_config=form,
                                      config_revision=files.revision)
    except Exception as error:  # third-party files can raise anything
        raise UserError(f"{file} does not load as the {name} of {source} ({' '.join(str(error).split())[:200]}): "
                        f"expected weights of a {cls.__name__}") from error
    _require_complete(file, name, module)
    return {name: module}


def vae(files: Load, source: str, index: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    """Load the autoencoder of `load.vae`, by its name in a pipeline.

    source: folder or hub id of the pipeline's configuration, which `index` is of. Raises UserError for a pipeline
    without one, and for weights of another kind.
    """
    import diffusers

    given = required(files.vae)
    if "vae" not in index:
        raise UserError(f"load.vae is {given!r}, but a {index['_class_name']} has no autoencoder: leave it out")
    cls = getattr(diffusers, index["vae"][1])
    try:
        if Path(given).is_file() and not hasattr(cls, "from_single_file"):
            module = cls.from_config(cls.load_config(source, subfolder="vae", revision=files.revision)).to(dtype)
            module.load_state_dict(tensors_of(given)[0])
        elif Path(given).is_file():
            module = cls.from_single_file(given, config=source, subfolder="vae", dtype=dtype,
                                          config_revision=files.revision)
        else:
            module = cls.from_pretrained(given, dtype=dtype)
    except Exception as error:  # third-party files can raise anything
        raise UserError(f"load.vae: {given} does not load as the vae of {source} ({' '.join(str(error).split())[:200]})"
                        f": expected weights of a {cls.__name__}") from error
    _require_complete(given, "vae", module)
    return {"vae": module}


def _require_complete(file: str, name: str, module: torch.nn.Module) -> None:
    absent = [key for key, value in module.state_dict(keep_vars=True).items() if value.is_meta]
    if absent:
        raise UserError(f"{file} lacks {len(absent)} of the weights of the {name}, such as {absent[0]}: expected a "
                        "file of a model like this one")
