"""Which kind of policy a model is, and the objects that go with it: the one place that asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowgrpo import methods
from flowgrpo.config import Config
from flowgrpo.errors import UserError
from flowgrpo.starter import FOLDERS

PIPELINE, CAUSAL_LM = "pipeline", "causal_lm"


def kind(config: Config) -> str:
    """PIPELINE for a diffusers pipeline, CAUSAL_LM for a language model. A folder's files say which; of a hub id it is
    what the method is for, so that nothing is asked of the hub. UserError for a folder that is neither."""
    folder = Path(FOLDERS.get(config.model, config.model))
    if not folder.is_dir():
        return CAUSAL_LM if methods.preset(config.method).for_tokens else PIPELINE
    if (folder / "model_index.json").is_file():
        return PIPELINE
    if (folder / "config.json").is_file():
        return CAUSAL_LM
    raise UserError(f"cannot load the model {config.model!r}: the folder has neither a model_index.json (a diffusers "
                    "pipeline) nor a config.json (a language model)")


def process(kind: str) -> str:
    """How a method's parts are tried before the model is loaded."""
    return "tokens" if kind == CAUSAL_LM else "flow"


def make_policy(config: Config, device: Any, loaded: Any = None):
    """The policy of a configuration, of a loaded pipeline or (model, tokenizer) where one is given."""
    if isinstance(loaded, tuple) or loaded is None and kind(config) == CAUSAL_LM:
        from flowgrpo.policies.causal_lm import CausalLM, load_causal_lm

        _require_plain(config)
        model, tokenizer = loaded or load_causal_lm(config.model, config.precision, config.trust_remote_code)
        return CausalLM(model, tokenizer, config.adapter, config.text, device=device, precision=config.precision,
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
