"""Kinds of models, and the policy of each kind. Only this module distinguishes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo import domains, hub
from flowgrpo.config.parse import read_yaml
from flowgrpo.config.schema import Config
from flowgrpo.data import provenance
from flowgrpo.data.prompts import LONGEST_TEXT, Prompt, require_length
from flowgrpo.errors import UserError
from flowgrpo.methods import keys_read, overlay
from flowgrpo.methods.targets import LatentEdits
from flowgrpo.policies import sources
from flowgrpo.starter import FOLDERS

if TYPE_CHECKING:
    import torch

PIPELINE, CAUSAL_LM, VISION_LM, MASKED_LM = "pipeline", "causal_lm", "vision_lm", "masked_lm"
IMAGE_TOKENS = "image_tokens"  # a language model of images in a run with text.generates: image


def kind(config: Config, loaded: Any = None) -> str:
    """PIPELINE for a diffusers pipeline, else which language model: CAUSAL_LM, VISION_LM for one that reads images,
    MASKED_LM, or IMAGE_TOKENS for one that draws them, where `text.generates` says so. A folder's files say which, or
    what is loaded; of a hub id it is what the method is for, without a request to the hub. UserError for a folder
    that is neither, and for a packaged model's name that is misspelt."""
    if loaded is not None:
        if not isinstance(loaded, tuple):
            return PIPELINE
        described = loaded[0].config.to_dict() | {"architectures": [type(loaded[0]).__name__]}
        return str(domains.sampled_by("tokens").kind(described, config.text.generates))
    # A hub id is not asked: whether the method is for tokens tells enough to choose the checks.
    folder = Path(FOLDERS.get(config.model, config.model))
    if not folder.is_dir():
        method = overlay.with_parts(overlay.preset(config.method), config.parts)
        if sources.is_file(config.model):
            sources.require_pipeline(config.model, method.for_tokens)
            return PIPELINE
        provenance.require_no_slip(config.model)
        if method.for_tokens and config.text.generates == "image":
            return IMAGE_TOKENS
        return (CAUSAL_LM if method.fits("tokens") else MASKED_LM) if method.for_tokens else PIPELINE
    if sources.index_file(folder).is_file():
        return PIPELINE
    if (folder / "config.json").is_file():
        try:
            described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"cannot load the model {folder}: its config.json is not JSON ({error})") from None
        described = described if isinstance(described, dict) else {}
        return str(domains.sampled_by("tokens").kind(described, config.text.generates))
    if (folder / "config.yaml").is_file():
        base = read_yaml(folder / "config.yaml").get("model")
        raise UserError(f"{config.model} is a run, not a model: give the model that it trained, and its weights with "
                        f"--lora, as in `flowgrpo sample {base} --lora {config.model}`")
    raise UserError(f"cannot load the model {config.model!r}: the folder has neither a model_index.json (a diffusers "
                    "pipeline) nor a config.json (a language model)")


def writes(model: str, config: Config | None = None) -> bool:
    """True for a language model, judged by the run that trained it, its files, or the hub.

    Raises UserError for a folder that is neither a language model nor a pipeline.
    """
    if sources.is_file(model):
        sources.require_pipeline(model)
        return False
    if config is None and model not in FOLDERS and "/" in model and not Path(model).exists():
        provenance.require_no_slip(model)
        return bool(on_hub(model))
    return kind(Config(model=model) if config is None else config) != PIPELINE


def drivable(loaded: Any) -> Any:
    """Wrap a ModularPipeline so that it can be driven; return any other loaded model unchanged."""
    if not hasattr(loaded, "_blocks"):
        return loaded
    from flowgrpo.policies.pipelines import modular

    return modular.drivable(loaded)


def process(kind: str) -> str:
    """Process with which a method's parts are tried before the model is loaded."""
    return next(domain.kinds[kind] for domain in domains.all() if kind in domain.kinds)


def load(config: Config, encoders: bool = True) -> Any:
    """Load the pipeline of a configuration, or its (model, tokenizer or processor).

    encoders: with its text encoders. Raises UserError if it does not load.
    """
    if (kind_of_model := kind(config)) != PIPELINE:
        keys_read.require_kind(config, kind_of_model)
        return domains.sampled_by("tokens").load(config)
    from flowgrpo.policies.pipelines.load import ALL, DENOISERS, load_pipeline

    return load_pipeline(config.model, config.precision, config.trust_remote_code, config.memory.weights, config.load,
                         ALL if encoders else DENOISERS, checker=False)


def has_checker(config: Config) -> bool:
    """True if a configuration's model has a safety checker, which `load` leaves out."""
    from flowgrpo.policies.pipelines import load

    return kind(config) == PIPELINE and load.has_checker(
        load.read_index(load.config_source(config.model, config.load), config.load.revision))


def skips_text_encoders(config: Config, prompts: Iterable[Prompt]) -> bool:
    """True if a run finds all of its prompts encoded, and neither trains nor asks text encoders."""
    method = overlay.with_parts(overlay.preset(config.method), config.parts)
    if config.cache is None or method.for_tokens or isinstance(method.target, LatentEdits) or \
            method.denoising.adapted.encoders:
        return False
    from flowgrpo.policies.pipelines import encoded_prompts

    return encoded_prompts.complete(config, prompts)


def modality_ahead(config: Config, loaded: Any = None) -> str | None:
    """Modality of a model that is not loaded yet; None for a pipeline whose model_index.json is not here."""
    if (of := kind(config, loaded)) != PIPELINE:
        return "image" if of == IMAGE_TOKENS else "text"
    from flowgrpo.policies.pipelines import load, modular

    cls = type(loaded) if loaded is not None else modular.class_of(
        load.index_ahead(config.model, config.load).get("_class_name"))
    return None if cls is None else load.modality(cls)


def require_inputs(config: Config, prompts: Sequence[Prompt], loaded: Any = None) -> None:
    """Raise UserError for the first prompt whose files the model does not take, or that lacks one.

    loaded: the model, once it is loaded; a pipeline on the hub is not known before.
    """
    if (model_kind := kind(config, loaded)) == PIPELINE:
        from flowgrpo.policies.pipelines import conditioned

        require_length(prompts)
        conditioned.require_prompts(config, prompts, loaded)
        return
    require_length(prompts, LONGEST_TEXT)
    for prompt in prompts:
        if model_kind == IMAGE_TOKENS and prompt.brings is not None:
            raise UserError(f"the prompt {prompt.text[:60]!r} brings an image, but image tokens are generated from a "
                            "text only (text.generates: image): leave the image out")
        for key in prompt.inputs.as_dict().keys() - {"image"}:
            raise prompt.inputs.error(key, f"{config.model} is a language model, which takes one `image` at most: "
                                           "leave it out")


def make_policy(config: Config, device: str | torch.device, loaded: Any = None) -> Any:
    """Policy of a configuration.

    loaded: its pipeline or (model, tokenizer or processor), if it is loaded already.
    """
    pipe = load(config) if loaded is None else loaded
    if isinstance(pipe, tuple):
        keys_read.require_kind(config, kind(config, pipe))
        return domains.sampled_by("tokens").policy(config, pipe, config.adapter, device)
    from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
    from flowgrpo.samplers.kernels import process

    keys_read.require_process(config, process(pipe.scheduler))
    method = overlay.with_parts(overlay.preset(config.method), config.parts)
    options: dict[str, Any] = dict(
        device=device, precision=config.precision, guidance=config.train.guidance, call=config.call,
        checkpointing=config.train.recompute_share, memory=config.memory, compiled=config.train.compile, fps=config.fps)
    if isinstance(method.target, LatentEdits):
        from flowgrpo.policies.pipelines.edits import EditPolicy

        return EditPolicy(pipe, method.target.edit, **options)
    return PipelinePolicy(pipe, config.adapter, adapted=method.rollout.adapted, **options)


def on_hub(model: str, revision: str | None = None) -> dict[str, Any]:
    """The config.json of a hub id; empty if there is none, as for a pipeline."""
    from transformers import PreTrainedConfig

    hub.require(model)
    try:
        return PreTrainedConfig.get_config_dict(model, revision=revision)[0]
    except OSError:  # as loading will tell
        return {}
