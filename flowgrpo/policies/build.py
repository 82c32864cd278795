"""Which kind of policy a model is, and the objects that go with it: the one place that asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowgrpo import methods
from flowgrpo.config import Config
from flowgrpo.errors import UserError
from flowgrpo.starter import FOLDERS

PIPELINE, CAUSAL_LM, VISION_LM = "pipeline", "causal_lm", "vision_lm"


def kind(config: Config) -> str:
    """PIPELINE for a diffusers pipeline, CAUSAL_LM for a language model, VISION_LM for one that reads images too. A
    folder's files say which; of a hub id it is what the method is for, so that nothing is asked of the hub, and loading
    tells the language models apart. UserError for a folder that is neither."""
    folder = Path(FOLDERS.get(config.model, config.model))
    if not folder.is_dir():
        return CAUSAL_LM if methods.preset(config.method).for_tokens else PIPELINE
    if (folder / "model_index.json").is_file():
        return PIPELINE
    if (folder / "config.json").is_file():
        return VISION_LM if reads_images(_described(folder)) else CAUSAL_LM
    raise UserError(f"cannot load the model {config.model!r}: the folder has neither a model_index.json (a diffusers "
                    "pipeline) nor a config.json (a language model)")


def process(kind: str) -> str:
    """How a method's parts are tried before the model is loaded."""
    return "flow" if kind == PIPELINE else "tokens"


def _described(folder: Path) -> dict[str, Any]:
    """What a model's config.json says; nothing where it is broken, of which loading tells."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def reads_images(described: dict[str, Any]) -> bool:
    """Whether transformers knows the model of this config.json as one that makes text of images and text."""
    from transformers.models.auto import modeling_auto

    both = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    for name in described.get("architectures") or ():
        alone = name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # some stand in both lists
        return name in both.values() and ("vision_config" in described or not alone)
    return described.get("model_type") in both and "vision_config" in described


def load_language_model(model: str, precision: str = "fp32", trust_remote_code: bool = False):
    """Load (model, tokenizer), or (model, processor) of one that reads images. UserError where it does not load."""
    from transformers import PreTrainedConfig

    from flowgrpo.policies.causal_lm import load_causal_lm

    source = Path(FOLDERS.get(model, model))
    try:
        described = _described(source) if source.is_dir() else PreTrainedConfig.get_config_dict(model)[0]
    except OSError:  # as loading will tell
        described = {}
    classes = [("AutoModelForImageTextToText", "AutoProcessor")] if reads_images(described) else []
    return load_causal_lm(model, precision, trust_remote_code, *classes)


def language_policy(model: Any, reader: Any, *rest: Any, **options: Any):
    """The policy of a loaded language model; reader: its tokenizer, or its processor. The rest are the arguments of
    `causal_lm.CausalLM`."""
    if hasattr(reader, "image_processor"):
        from flowgrpo.policies.vlm import VisionLM

        return VisionLM(model, reader, *rest, **options)
    from flowgrpo.policies.causal_lm import CausalLM

    return CausalLM(model, reader, *rest, **options)


def make_policy(config: Config, device: Any, loaded: Any = None):
    """The policy of a configuration, of a loaded pipeline or (model, tokenizer or processor) where one is given."""
    if isinstance(loaded, tuple) or loaded is None and kind(config) != PIPELINE:
        _require_plain(config)
        model, reader = loaded or load_language_model(config.model, config.precision, config.trust_remote_code)
        return language_policy(model, reader, config.adapter, config.text, device=device, precision=config.precision,
                               checkpointing=config.train.checkpointing)
    from flowgrpo.policies.load import load_pipeline
    from flowgrpo.policies.pipeline import PipelinePolicy

    pipe = loaded or load_pipeline(config.model, config.precision, config.trust_remote_code, config.memory.weights)
    return PipelinePolicy(pipe, config.adapter, device=device, precision=config.precision,
                          guidance=config.train.guidance, call=config.call, checkpointing=config.train.checkpointing,
                          memory=config.memory, compiled=config.train.compile)


def _require_plain(config: Config) -> None:
    """UserError for options that a language model does not read, which would be silently without effect."""
    unread = {"memory": config.memory != type(config.memory)(), "picture": config.picture != type(config.picture)(),
              "train.compile": config.train.compile, "train.pack": config.train.pack, "cache": config.cache is not None,
              "negative_prompt": bool(config.negative_prompt)}
    if asked := [key for key, value in unread.items() if value]:
        raise UserError(f"{asked[0]} is set, which is about denoisers: leave it out for a language model")


def make_explorer(config: Config, policy: Any, *rest: Any):
    """What samples and replays the policy: the arguments are those of `explorer.Explorer`."""
    if policy.process == "tokens":
        from flowgrpo.policies.text_explorer import TextExplorer

        return TextExplorer(config, policy, *rest)
    from flowgrpo.policies.explorer import Explorer

    return Explorer(config, policy, *rest)
