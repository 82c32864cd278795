"""Tables of what a run reads: the parts of a method by what is trained, the keys of a configuration by the kind of
model. A user's setting that a run would not read is an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from flowgrpo import objectives
from flowgrpo.advantages import baselines, length_shaping, selection, shaping
from flowgrpo.config.schema import Config, fields
from flowgrpo.errors import UserError
from flowgrpo.methods import registry
from flowgrpo.methods.method import Method
from flowgrpo.objectives import actor_critic, forward_process, ratios, references, sequence_losses, token_losses
from flowgrpo.samplers import noised_finals, plans

# What a method trains.
STEPS, JOINT, FINALS, GRADIENT, EDITS = ("recorded steps", "a joint density", "noised finals", "a reward's gradient",
                                         "latent edits")
PAIRS = "recorded pairs"
COMPLETIONS, TRACES, RELAXED = "completions", "traces of an unmasking", "a relaxed unmasking"
_DRAWN = {STEPS, JOINT, FINALS, GRADIENT, EDITS}
_TEXTS = {COMPLETIONS, TRACES}
_ALL = _DRAWN | _TEXTS | {PAIRS, RELAXED}

# Which of them read each part of a method.
PARTS: dict[str, set[str]] = {
    "kernel": _ALL - {PAIRS},
    "plan": _DRAWN,
    "solver": _DRAWN,
    "tail": _DRAWN - {GRADIENT},
    "roots": _DRAWN,
    "strides": {STEPS},
    "preview": _DRAWN - {EDITS} | {PAIRS},  # which has an error of its own
    "shaping": _ALL,
    "advantage": _ALL,
    "selection": _ALL,
    "log_ratio": _ALL,
    "surrogate": _ALL,
    "step_weight": {STEPS, FINALS, PAIRS},
    "reduction": _TEXTS,  # a transition has one decision per row, of which all means are the same
    "kl": _ALL - {GRADIENT, RELAXED},
    "reference": _ALL - {GRADIENT, RELAXED},
    "tuning": {STEPS},
    "times": {FINALS, PAIRS},
    "lag": {STEPS, JOINT, FINALS, GRADIENT, PAIRS},
    "backprop": {GRADIENT, RELAXED},
    "edit": {EDITS},
    "adapted": {STEPS, JOINT, FINALS, GRADIENT, PAIRS},
    "chain": {JOINT},
    "draws": _TEXTS,
    "spread": _TEXTS,
    "curriculum": _ALL,
    "redraw": _ALL - {GRADIENT, RELAXED, PAIRS},
    "value": _TEXTS | {EDITS}}

# Parts that fewer of them read than their place says.
TYPES: dict[type, set[str]] = {
    **dict.fromkeys((ratios.SequenceRatio, ratios.CompletionRatio, objectives.DynamicClip, references.Teacher,
                     sequence_losses.OfCompletions, token_losses.LikelihoodKept, shaping.Overlong,
                     length_shaping.LengthSwitch,
                     length_shaping.ExitDecay), _TEXTS),
    **dict.fromkeys((forward_process.OfNoised, ratios.Matching), {FINALS, PAIRS}),
    actor_critic.ActorCritic: {EDITS},
    baselines.Paired: {EDITS},
    objectives.NoiseLevel: {STEPS},
    objectives.Ascent: {GRADIENT, RELAXED}}

# Plans by which every step draws noise, all of them or all but the last; a single step is Euler's of any solver.
_NOISY = {plans.AllSteps, plans.RandomSubset, plans.Branches, plans.GrowingTail, plans.LastSteps, plans.RandomLast,
          plans.LateStep}
# Of a place that is read, what leaves it without effect: a test of the method, and its cure.
_IDLE: dict[str, tuple[Callable[[Method], bool], str]] = {
    "kernel": (lambda m: not m.for_tokens and isinstance(m.plan, plans.NoSteps), "its plan NoSteps draws no noise"),
    **dict.fromkeys(("solver", "tail"), (
        lambda m: type(m.plan) in _NOISY, "its plan leaves no two deterministic steps in a row")),
    "reference": (lambda m: not objectives.regularises(m.kl) and not m.compares_with_reference,
                  "it is read by a KL alone, whose weight is 0: set parts.kl.weight"),
    **dict.fromkeys(("advantage", "shaping"),
                    (lambda m: m.backprop is not None and isinstance(m.selection, selection.All),
                     "its surrogate follows the reward itself, and its selection keeps all samples"))}


def target(method: Method, process: str, pairs: bool = False) -> str:
    """Return what a method trains of a model of this process. pairs: True if recorded pairs replace samples."""
    if process in ("tokens", "masks"):
        return COMPLETIONS if process == "tokens" else RELAXED if method.backprop else TRACES
    choices = {EDITS: method.edit is not None, GRADIENT: method.backprop is not None,
               PAIRS if pairs else FINALS: not isinstance(method.times, noised_finals.Recorded),
               JOINT: method.chain is not None}
    return next((name for name, chosen in choices.items() if chosen), STEPS)


def places(method: Method, own: str) -> list[str]:
    """The places of the parts that a method reads where it trains `own`, in the order of its fields."""
    return [name for name, by in PARTS.items() if own in by and not (name in _IDLE and _IDLE[name][0](method))]


def require_set(host: Method, method: Method, overlays: dict[str, tuple[Method, Method]], own: str) -> None:
    """Raise UserError for a part that the user set and that a method which trains `own` does not read.

    host: what the presets make, over which `parts` made the method. overlays: of presets that change another, by name,
    the method before and after; one is refused where nothing that it changes is read.
    """
    read = places(method, own)
    for name, (before, after) in overlays.items():
        changed = _changed(before, after)
        if changed and not set(changed) & set(read):
            raise UserError(_refusal(own, read, changed[0], f"the preset {name}"))
    for place in _changed(host, method):
        if place not in read:
            why = f" ({_IDLE[place][1]})" if place in _IDLE and own in PARTS[place] else ""
            raise UserError(_refusal(own, read, place, f"parts.{place} {_short(getattr(method, place))}{why}"))


def require_types(method: Method, own: str) -> None:
    """Raise UserError for a part that cannot be read if `own` is trained, though another one in its place can."""
    for place in places(method, own):
        part = getattr(method, place)
        if not _reads(type(part), own):
            fitting = [name for name in registry.of_place(place) if _reads(registry.TYPES[name], own)]
            by = next(by for kind, by in TYPES.items() if isinstance(part, kind))
            raise UserError(f"parts.{place}: got {type(part).__name__}, which reads {' or '.join(sorted(by))}, but the "
                            f"method trains {own}: expected one of {', '.join(fitting)}")


def _reads(part: type, own: str) -> bool:
    return all(own in by for kind, by in TYPES.items() if issubclass(part, kind))


def _changed(before: Method, after: Method) -> list[str]:
    return [field.name for field in dataclasses.fields(Method)
            if getattr(before, field.name) != getattr(after, field.name)]


def _refusal(own: str, read: Iterable[str], place: str, got: str) -> str:
    return f"a method that trains {own} reads no {place}: got {got}, leave it out; it has: {', '.join(read)}"


def _short(part: Any) -> str:
    return type(part).__name__ if dataclasses.is_dataclass(part) else repr(part)


_OF_DENOISERS = (
    "memory", "picture", "cache", "negative_prompt", "preferences", "labels", "adapter.encoder_targets",
    "train.compile", "train.pack", "train.steps", "train.guidance", "train.grid", "train.shift", "eval.steps",
    "eval.guidance")
# Keys and sections that a kind of model (`policies.build`) does not read.
UNREAD: dict[str, tuple[str, ...]] = {
    "pipeline": ("text",),
    "causal_lm": _OF_DENOISERS,
    "vision_lm": _OF_DENOISERS,
    "masked_lm": (*_OF_DENOISERS, "text.shared_prefix", "text.engine", "text.engine_precision", "text.engine_memory",
                  "text.correction", "text.correction_cap", "text.correction_level")}


def require_keys(config: Config, kind: str) -> None:
    """Raise UserError for a changed key that a model of this kind (`policies.build`) does not read."""
    about = "language models" if kind == "pipeline" else "causal language models"
    for key, field in fields().items():
        if not any(f"{key}.".startswith(f"{name}.") for name in UNREAD[kind]):
            continue
        value = config
        for name in key.split("."):
            value = getattr(value, name)
        if value != field.default:
            what = about if key.startswith("text.") else "denoisers"
            model = {"pipeline": "pipeline", "masked_lm": "masked language model"}.get(kind, "language model")
            raise UserError(f"{key} is set, which is about {what}: leave it out for a {model} (got {value!r}, expected "
                            f"the default, {field.default!r})")
