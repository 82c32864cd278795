"""Defaults of a run that depend on its model: of a language model, a packaged one, and a model of few steps."""

from __future__ import annotations

from typing import Any

from flowgrpo.config.schema import Config
from flowgrpo.policies import build
from flowgrpo.policies.pipelines import few_steps
from flowgrpo.starter import EVAL

OF_LANGUAGE = "grpo"  # the method of a language model whose recipe names none


def fitting(config: Config, loaded: Any = None) -> tuple[Config, str]:
    """Return the configuration whose absent keys fit the model, and what is to be said of it; empty for nothing.

    A language model gets its method, one of image tokens the guidance of its rollout in evaluations, a packaged model
    the evaluation of its card, a model of few steps its method, steps, grid and guidance. The defaults are of other
    denoisers. Given values stay.
    """
    if config.text.generates == "image" and "guidance" not in config.eval.model_fields_set:
        scale = config.train.guidance
        config = config.model_copy(update={"eval": config.eval.model_copy(update={"guidance": scale})})
        return fitting(config, loaded)[0], f"eval.guidance {scale:g}, that of the rollout (train.guidance)"
    if "method" not in config.model_fields_set and build.is_language(config, loaded):
        return config.model_copy(update={"method": OF_LANGUAGE}), ""
    if isinstance(loaded, tuple):
        return config, ""
    given = config
    if card := EVAL.get(config.model):
        own = {"steps": card["num_inference_steps"], "guidance": card["guidance"]}
        config = config.model_copy(update={"eval": config.eval.model_copy(update={
            key: value for key, value in own.items() if key not in config.eval.model_fields_set})})
    facts = few_steps.ahead(config.model, config.load) if loaded is None else few_steps.of_pipe(
        loaded, config.model, config.load)
    if (why := facts.why) is None or build.kind(config, loaded) != build.PIPELINE:
        return config, ""
    fitted = few_steps.few_step_config(config, facts)
    said = few_steps.describe_changes(given, fitted)
    return fitted, f"a model of few steps ({why}), so by default: {said}" if said else ""
