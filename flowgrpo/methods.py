"""Methods by name: presets stack, and a recipe's `parts` are laid over them.

`preset("mix_grpo", "grpo_guard")`, on the command line `--method mix_grpo+grpo_guard`. Nothing anywhere asks for a
method's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flowgrpo import objectives, registry
from flowgrpo.config import Config, nearest
from flowgrpo.errors import UserError
from flowgrpo.gaussian import log_prob
from flowgrpo.method import OF_TEXT, Method
from flowgrpo.objectives import actor_critic, completion, forward_process, tokenwise
from flowgrpo.parts import critic, redraws, references, spreads
from flowgrpo.presets import HOSTS, PRESETS
from flowgrpo.samplers import backprop, chains, noise_net, plans, relaxation
from flowgrpo.samplers.grids import shifted
from flowgrpo.samplers.rollout import Exploration


def preset(*names: str) -> Method:
    """Stack presets from left to right: preset("mix_grpo", "grpo_guard") or preset("mix_grpo+grpo_guard"). UserError
    for an unknown one, and for two of which each says what is trained."""
    method, asked = Method(), [part.strip() for joined in names for part in joined.split("+")]
    for name in asked:
        if name not in PRESETS:
            raise UserError(f"unknown method {name!r}{nearest(name, list(PRESETS))}")
    if len(hosts := [name for name in asked if name in HOSTS]) > 1:
        raise UserError(f"method {'+'.join(names)}: {hosts[0]} and {hosts[1]} each say what is trained: name one of "
                        "them, and beside it presets that change one thing, such as grpo_guard")
    for name in asked:
        try:
            method = PRESETS[name](method)
        except ValueError as error:
            raise UserError(f"method {'+'.join(names)}: {error}") from None
    return method


def with_parts(method: Method, parts: dict[str, Any]) -> Method:
    """Lay a recipe's `parts` over a method: {"plan": {"size": 2}, "kernel": {"type": "CPS", "level": 0.8}}."""
    return _overlay(method, parts, "parts")


def _overlay(part: Any, changes: dict[str, Any], path: str) -> Any:
    hint = "" if "type" in changes or isinstance(part, Method) else (
        f" ({path} is {type(part).__name__}; a recipe's parts may be meant for another method: --parts={{}} leaves "
        "them out)")
    if "type" in changes and not isinstance(part, Method):
        changes = dict(changes)
        cls = _named(part, changes.pop("type"), path)
        if type(part) is not cls:
            if any(field.default is dataclasses.MISSING for field in dataclasses.fields(cls)):
                return _build(cls, changes, path)
            part = cls()
    elif part is None:
        raise UserError(f"{path}: got {changes!r}, expected a type with it, such as {{type: Preview}}")
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    for key in changes:
        if key not in fields:
            raise UserError(f"unknown key {path}.{key}{nearest(key, list(fields))}{hint}")
        if dataclasses.is_dataclass(fields[key]) and not isinstance(changes[key], dict):
            raise UserError(f"{path}.{key}: got {changes[key]!r}, expected keys with values, such as "
                            f"{{type: {type(fields[key]).__name__}}}")
    values = {key: _overlay(fields[key], value, f"{path}.{key}") if _nested(fields[key], value) else value
              for key, value in changes.items()}
    return _build(lambda **kept: replace(part, **kept), values, path)


def _named(part: Any, name: Any, path: str) -> type:
    """The type of that name, which goes where `part` stands, or to the absent one that the path ends with."""
    place = path.rpartition(".")[2] if part is None else registry.PLACES[type(part)]
    if name not in registry.TYPES:
        raise UserError(f"{path}.type: unknown part {name!r}{nearest(str(name), sorted(registry.TYPES))}")
    if registry.PLACES[registry.TYPES[name]] != place:
        there = ", ".join(registry.of_place(place)) or "no parts, but a value"
        raise UserError(f"{path}.type: {name} does not belong there; there are: {there}")
    return registry.TYPES[name]


def _nested(part: Any, value: Any) -> bool:
    """Where a recipe's value is keys with values for a part, or for the place of one that is absent."""
    return isinstance(value, dict) and (part is None or dataclasses.is_dataclass(part))


def _build(make: Callable[..., Any], values: dict[str, Any], path: str) -> Any:
    try:
        return make(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def resolve(config: Config, process: str = "flow") -> Method:
    """The method a configuration asks for, its parts tried on the configuration's number of steps and samples."""
    method, train = with_parts(preset(config.method), config.parts).on(process), config.train
    if process in OF_TEXT:
        return _on_tokens(method, config)
    grid, x = shifted(train.steps, train.shift), torch.zeros(1, 1)
    if process == "vp":
        grid = torch.linspace(0.01, 0.99, train.steps + 1)  # alpha-bars, as good as any for a trial
    try:
        if isinstance(method.surrogate, objectives.DynamicClip):
            raise ValueError("the surrogate DynamicClip reads probabilities of tokens, not densities: use Clip")
        _require_decisions(method, method.noised(grid, train.group, 0, config.seed))
        if isinstance(method.reference, references.Teacher):
            raise ValueError("the reference Teacher is a language model: use Base")
        actor_critic.require(method, train.group)
        if train.pack and (method.backprop or method.chain or method.edit):
            raise ValueError("train.pack puts recorded steps into one call, and these have none of their own: set it "
                             "to false")
        if not isinstance(method.reference, references.Base) and not objectives.regularises(method.kl) \
                and not method.compares_with_reference:
            raise ValueError(f"the reference {type(method.reference).__name__} is read by a KL alone, whose weight is "
                             "0: set parts.kl.weight")
        method.selection(torch.zeros(1, train.group))
        critic.require(method)
        if method.backprop:
            backprop.require(method)
        elif isinstance(method.surrogate, objectives.Ascent):
            raise ValueError("the surrogate Ascent follows a reward's gradient: set parts.backprop: {type: Unroll}")
        explorations = method.explorations(grid, train.group, train.shift, 0, config.seed)
        if method.backprop:
            backprop.require_one_step(explorations)
        if not isinstance(method.redraw, redraws.Never) and (method.backprop or len(explorations) > 1):
            raise ValueError(f"redraw is {type(method.redraw).__name__}, which goes with methods that sample a group "
                             "per prompt and compare its rewards: set parts.redraw: {type: Never}")
        noise_net.require(method, [each.schedule for each in explorations])
        if method.chain:
            chains.require(method, explorations)
        for exploration in () if method.backprop else explorations:
            for step in exploration.schedule.trained:
                log_prob(exploration.transition(x, x, exploration.grid, step), x)
    except (TypeError, ValueError) as error:
        raise UserError(f"method {config.method} with train.steps {train.steps}, train.group {train.group} and "
                        f"parts {config.parts}: {error}") from None
    return method


def _on_tokens(method: Method, config: Config) -> Method:
    """The method, its parts tried on the configuration's number of samples."""
    try:
        if method.reads_means or method.tuning.weight:
            raise ValueError("a part reads means of transitions, which tokens have none of: use SampledKL and Clip")
        if method.adapted.encoders:
            raise ValueError("adapted.encoders trains a pipeline's text encoders, which a language model has none of")
        if method.kernel.greedy + method.kernel.expert >= config.train.group:
            given = {"greedy samples": method.kernel.greedy, "answers": method.kernel.expert}
            told = " and ".join(f"{count} {what}" for what, count in given.items() if count)
            raise ValueError(f"{told} leave none of the group to train")
        if config.train.group % method.draws.leaves:
            raise ValueError(f"draws is {type(method.draws).__name__} with {method.draws.leaves} leaves: expected a "
                             "train.group that is a multiple of them")
        critic.require(method)
        if method.backprop:
            relaxation.require(method)
        elif isinstance(method.surrogate, objectives.Ascent):
            raise ValueError("the surrogate Ascent follows a reward's gradient: use Clip, or the method drakes")
        if isinstance(method.surrogate, tokenwise.ExpertMixture) and not method.kernel.expert:
            raise ValueError("the surrogate ExpertMixture is about answers that join their group: set "
                             "parts.kernel.expert: 1")
        if getattr(method.surrogate, "of_advantages", False) and type(method.spread) is not spreads.Evenly:
            raise ValueError(f"the surrogate {type(method.surrogate).__name__} reads one advantage per completion, but "
                             f"{type(method.spread).__name__} spreads it: set parts.spread: {{type: Evenly}}")
        method.selection(torch.zeros(1, config.train.group))
    except ValueError as error:
        raise UserError(f"method {config.method} with train.group {config.train.group} and parts {config.parts}: "
                        f"{error}") from None
    return method


def _require_decisions(method: Method, noised: Exploration | None) -> None:
    """ValueError where what is trained and what the loss reads do not go together."""
    if noised is None and method.edit is None and isinstance(method.plan, plans.NoSteps):
        raise ValueError("the plan NoSteps records no step to be trained: set parts.times, or another plan")
    if noised is None and isinstance(method.surrogate, forward_process.OfNoised):
        raise ValueError(f"the surrogate {type(method.surrogate).__name__} reads noised finals, but times is Recorded: "
                         "set parts.times, such as {type: GridTimes}")
    if isinstance(method.surrogate, completion.OfCompletions):
        raise ValueError(f"the surrogate {type(method.surrogate).__name__} reads completions of a language model: use "
                         "Clip")
    if noised is not None and (method.strides != (1,) or method.tuning.weight):
        raise ValueError(f"strides are {list(method.strides)} and tuning.weight {method.tuning.weight}, but noised "
                         "finals have neither granularities nor a best path: expected [1] and 0")
    of_steps = [cure for cure, found in {
        "log_ratio: {type: Matching}": isinstance(method.log_ratio, objectives.Guard),
        "step_weight: {type: Uniform}": isinstance(method.step_weight, objectives.InverseDelta)}.items() if found]
    if noised is not None and of_steps:
        raise ValueError("Guard and InverseDelta (the preset grpo_guard) go by the noise and length of recorded steps, "
                         f"but times is {type(method.times).__name__}: leave grpo_guard out, or set parts: "
                         f"{{{', '.join(of_steps)}}}")
