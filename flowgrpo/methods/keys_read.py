"""Keys of a configuration that a run reads: by the kind of its model, and by its other keys and its method.

A changed key that the run would not read is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from flowgrpo.config.schema import Config, fields
from flowgrpo.config.sections import Memory
from flowgrpo.errors import UserError
from flowgrpo.methods import targets
from flowgrpo.methods.method import Method
from flowgrpo.methods.setup import Setup
from flowgrpo.samplers.noised_finals import Stratified

_OF_DENOISERS = (
    "load.config", "load.denoiser", "load.lora", "load.controlnet", "load.ip_adapter",
    *(f"memory.{name}" for name in Memory.model_fields if name != "rewards"),
    "picture", "rollout", "negative_prompt", "adapter.encoder_targets",
    "train.compile", "train.pack", "train.one_pass", "train.steps", "train.guidance", "train.grid", "train.shift",
    "eval.steps", "eval.guidance", "eval.frames")
_OF_PAIRS = ("preferences", "labels")
_OF_PARTIAL = ("text.over_provision", "text.chunk")
_OF_ENGINES = ("text.correction", "text.correction_cap", "text.correction_level")
# Keys and sections that a kind of model (`policies.build`) does not read.
UNREAD: dict[str, tuple[str, ...]] = {
    "pipeline": ("text",),
    "causal_lm": _OF_DENOISERS,
    "vision_lm": (*_OF_DENOISERS, *_OF_PARTIAL),
    "masked_lm": (*_OF_DENOISERS, *_OF_PAIRS, *_OF_PARTIAL, "text.shared_prefix", "text.engine",
                  "text.engine_precision", "text.engine_memory", *_OF_ENGINES)}


@dataclass(frozen=True)
class Condition:
    """Condition on which a run reads some keys.

    read: True for a configuration and its method that read them.
    why: what it has instead; {0} stands for the configuration, {1} for the method. cure: what would have them read.
    """

    keys: tuple[str, ...]
    read: Callable[[Config, Method], bool]
    why: str
    cure: str


CONDITIONS = (
    Condition(("rollout.timeout", "rollout.retries", "rollout.folder", "rollout.release"),
              lambda c, m: c.rollout.engine is not None, "the pipeline itself draws", "set rollout.engine"),
    Condition(("rollout.cache_threshold",), lambda c, m: c.rollout.cache in ("first_block", "mag"),
              "rollout.cache is {0.rollout.cache!r}", "set rollout.cache: first_block or mag"),
    Condition(("rollout.cache_interval",), lambda c, m: c.rollout.cache == "taylorseer",
              "rollout.cache is {0.rollout.cache!r}", "set rollout.cache: taylorseer"),
    Condition(("rollout.cache",), lambda c, m: not isinstance(m.target, targets.RecordedPairs),
              "preferences is set, so that no image is sampled", "leave preferences out"),
    Condition(("cache",), lambda c, m: not m.for_tokens or any(rule.cache for rule in (c.trained | c.watched).values()),
              "prompts of a language model are not kept, and no reward keeps its scores",
              "set cache: true of a reward"),
    Condition(("text.chunk",), lambda c, m: c.text.over_provision > 0,
              "text.over_provision is 0", "set text.over_provision"),
    Condition(("text.truncated",), lambda c, m: c.preferences is None,
              "preferences is set, so that no completion is sampled", "leave preferences out"),
    Condition(("text.truncated",), lambda c, m: not (m.for_tokens and m.target.follows_reward),
              "method {0.method} trains {1.target.trains}, whose tokens are not cut off", "use another method"),
    Condition(("text.penalty",), lambda c, m: c.text.truncated == "penalise",
              "text.truncated is {0.text.truncated!r}", "set text.truncated: penalise"),
    Condition(("text.engine_memory",), lambda c, m: c.text.engine == "vllm",
              "text.engine is {0.text.engine!r}", "set text.engine: vllm"),
    Condition(_OF_ENGINES, lambda c, m: c.text.engine == "vllm" or
              c.text.engine_precision not in (None, c.precision) or c.precision != "fp32",
              "the model itself draws the completions in fp32, in which it is trained",
              "set text.engine, text.engine_precision or another precision"),
    Condition(("text.correction_cap", "text.correction_level"), lambda c, m: c.text.correction != "none",
              "text.correction is 'none'", "set text.correction: tis or mis"),
    Condition(("train.steps", "train.grid", "train.shift"), lambda c, m: not (
              isinstance(m.target, targets.RecordedPairs) and isinstance(m.target.times, Stratified)),
              "preferences is set, so that no image is sampled, and parts.times Stratified reads no grid",
              "set parts.times: {type: GridTimes}"),
    Condition(("train.shift",), lambda c, m: c.train.grid != "stock",
              "train.grid is 'stock', the pipeline's own", "set train.grid: shifted"),
    Condition(("train.staleness_cap",), lambda c, m: c.train.staleness > 0 or c.text.over_provision > 0,
              "train.staleness and text.over_provision are 0", "set train.staleness or text.over_provision"),
    Condition(("train.extrapolate_every",), lambda c, m: c.train.extrapolate > 0,
              "train.extrapolate is 0", "set train.extrapolate"),
    Condition(("guard.false_alarms", "guard.reward", "guard.lr", "guard.best"), lambda c, m: c.guard.window > 0,
              "guard.window is 0", "set guard.window"),
    Condition(("guard.reward", "guard.best"), lambda c, m: c.eval.every > 0,
              "eval.every is 0, so that nothing is measured in between", "set eval.every"),
    Condition(("train.ema",), lambda c, m: c.eval.weights == "ema",
              "eval.weights is {0.eval.weights!r}", "set eval.weights: ema"),
    Condition(("adapter.alpha", "adapter.targets"), lambda c, m: c.adapter.rank > 0,
              "adapter.rank is 0, which trains all weights without a LoRA", "set a rank"),
    Condition(("adapter.targets",), lambda c, m: m.for_tokens or m.denoising.adapted.denoisers,
              "parts.adapted.denoisers is false", "set it to true"),
    Condition(("adapter.encoder_targets",), lambda c, m: m.denoising.adapted.encoders,
              "the method trains no text encoder", "set parts.adapted.encoders: true"))


def require_kind(config: Config, kind: str, where: str = "") -> None:
    """Raise UserError for a changed key that a model of this kind (`policies.build`) does not read. where: before it.
    """
    about = "language models" if kind == "pipeline" else "causal language models"
    for key in _changed(config):
        if not any(f"{key}.".startswith(f"{name}.") for name in UNREAD[kind]):
            continue
        what = about if key.startswith("text.") else "denoisers" + " and causal language models" * (key in _OF_PAIRS)
        model = {"pipeline": "pipeline", "masked_lm": "masked language model"}.get(kind, "language model")
        raise UserError(f"{where}{key} is set, which is about {what}: leave it out for a {model} (got "
                        f"{attrgetter(key)(config)!r}, expected the default, {fields()[key].default!r})")


def check(setup: Setup) -> None:
    """Raise UserError for a changed key that a run of this kind of model and method does not read."""
    config, method, where = setup.config, setup.method, setup.where
    require_kind(config, setup.kind, where)
    changed = {*_changed(config)}
    for condition in CONDITIONS:
        for key in (key for key in condition.keys if key in changed and not condition.read(config, method)):
            why = condition.why.format(config, method)
            raise UserError(f"{where}{key} is {attrgetter(key)(config)!r}, but {why}, so that the run does not read "
                            f"it: {condition.cure}, or leave {key} out (expected the default, "
                            f"{fields()[key].default!r})")


def require_process(config: Config, process: str) -> None:
    """Raise UserError for a changed key that a pipeline of a process, "flow" or "vp", does not read."""
    key = "train.shift"
    if process == "vp" and key in _changed(config):
        raise UserError(f"{key} is {config.train.shift!r}, but this model is variance-preserving (it predicts noise or "
                        f"v) and has its scheduler's grid: leave it out (expected the default, "
                        f"{fields()[key].default!r})")


def _changed(config: Config) -> list[str]:
    """Return the dotted keys whose value is not the default."""
    return [key for key, field in fields().items() if attrgetter(key)(config) != field.default]
