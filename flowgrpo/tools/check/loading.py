"""Pipelines that `check` drives: a tiny instance of a class, a folder, a file, or a model of the hub."""

import difflib
from pathlib import Path
from typing import Any

import diffusers

from flowgrpo.config.schema import Config
from flowgrpo.device import DTYPES
from flowgrpo.errors import UserError
from flowgrpo.policies.pipelines.call import silence_warnings
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.starter import FOLDERS
from flowgrpo.tools.check import tiny

LIKE = 0.8  # minimum similarity at which a name is a misspelt class, not a hub id


class Unknown(UserError):
    """Error: the model is not available, so nothing can be reported."""


def load_model(model: str, config: Config) -> tuple[Any, dict[str, Any]]:
    """Load the pipeline in the recipe's precision; return it with the arguments of its call."""
    known = tiny.factories()
    if Path(model).exists() or model in FOLDERS or not (model in known or model.isidentifier()):
        return _read(model, config)
    if model not in known and hasattr(diffusers, model):
        refuse(getattr(diffusers, model))
        raise Unknown(f"there is no tiny instance of {model}, so that nothing is known of it: give a directory or a "
                      "hub id of such a pipeline")
    close = difflib.get_close_matches(model, [*known, *FOLDERS], n=1, cutoff=LIKE)
    if model not in known and not model.endswith("Pipeline") and not close:
        return _read(model, config)
    pipe, call = tiny.make(model)
    with silence_warnings():  # warnings about modules that loading, unlike casting, would keep in fp32
        return pipe.to(DTYPES[config.precision]), call


def _read(model: str, config: Config) -> tuple[Any, dict[str, Any]]:
    pipe = load_pipeline(model, config.precision, weights=config.memory.weights, files=config.load, checker=False)
    return pipe, config.model_copy(update={"model": model}).call


def refuse(cls: type) -> None:
    """Raise UserError for a pipeline class that cannot be driven with any weights."""
    if not hasattr(cls, "encode_prompt"):
        raise UserError(f"{cls.__name__} has no encode_prompt: its conditioning cannot be cached")
