"""Pipelines without weights: every component from its configuration file, on the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flowgrpo.dry_run.meta_gpu import META
from flowgrpo.errors import UserError

WEIGHTS = ["*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.onnx*", "*.gguf", "*.png",
           "*.jpg", "*.mp4"]


@contextlib.contextmanager
def made_in(dtype: torch.dtype) -> Iterator[None]:
    """Context manager: modules are made on the meta device in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with META:
            yield
    finally:
        torch.set_default_dtype(before)


def pipeline(model: str, dtype: torch.dtype) -> Any:
    """Return the pipeline of a folder or hub id with weights of this dtype and no values.

    Of a hub id only configurations and tokenizers are fetched. Raises UserError if there is no such pipeline.
    """
    import diffusers

    folder = _folder(model)
    index = folder / "model_index.json"
    if not index.is_file():
        raise UserError(f"no model_index.json in {model}: a dry run needs the folder or hub id of a diffusers pipeline")
    described = diffusers.DiffusionPipeline.load_config(folder)
    cls = getattr(diffusers, described["_class_name"], None)
    if cls is None:
        raise UserError(f"diffusers has no {described['_class_name']}, which {index} names")
    parts = {name: value for name, value in described.items() if not name.startswith("_")}
    components = {name: _component(folder, name, *value, dtype) if isinstance(value, list) and len(value) == 2 else value
                  for name, value in parts.items()}
    return cls(**components)


def _folder(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, ignore_patterns=WEIGHTS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(f"the configuration of {model!r} cannot be fetched ({str(error).splitlines()[0]}): give a "
                        "folder that has it") from error


def _component(folder: Path, name: str, library: str | None, kind: str | None, dtype: torch.dtype) -> Any:
    """Return a component: modules without weights, all else as it is loaded."""
    if library is None or kind is None:
        return None
    import diffusers
    import transformers

    cls = getattr({"diffusers": diffusers, "transformers": transformers}.get(library), kind, None)
    if cls is None:
        raise UserError(f"the component {name} is a {kind} of {library}, which a dry run cannot make")
    if not issubclass(cls, torch.nn.Module):
        return cls.from_pretrained(folder, subfolder=name)
    with made_in(dtype):
        if library == "diffusers":
            module = cls.from_config(cls.load_config(folder, subfolder=name))
        else:
            return cls._from_config(cls.config_class.from_pretrained(folder, subfolder=name), dtype=dtype)
    for key, part in module.named_modules():
        if any(kept in key.split(".") for kept in getattr(module, "_keep_in_fp32_modules", None) or ()):
            part.float()
    return module
