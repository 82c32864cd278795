"""Parts that a recipe can name, by their place in a method: parts of one place can stand for each other."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from flowgrpo.advantages import (
    baselines,
    correctness,
    gae,
    group,
    length_shaping,
    reward_weights,
    selection,
    shaping,
    token_credit,
)
from flowgrpo.advantages.group import AdvantageRule
from flowgrpo.advantages.shaping import Shaping
from flowgrpo.advantages.token_credit import TokenCredit
from flowgrpo.curriculum import categories, history, order, prediction, replay, resampling
from flowgrpo.methods import adapted, targets
from flowgrpo.methods.groups import Credit, Denoising, Loss, TextGeneration
from flowgrpo.objectives import (
    actor_critic,
    best_path,
    forward_process,
    kl,
    ratios,
    reductions,
    references,
    schedules,
    sequence_losses,
    step_weights,
    surrogates,
    token_losses,
)
from flowgrpo.objectives.kl import Penalty
from flowgrpo.objectives.ratios import LogRatio
from flowgrpo.objectives.surrogates import Surrogate
from flowgrpo.samplers import (
    kernels,
    latent_edits,
    learned_noise,
    noised_finals,
    old_policy,
    plans,
    preview,
    reward_gradient,
    solvers,
)
from flowgrpo.samplers.text import decoding, groups, gumbel_softmax, lookahead, trees

# By the field of a Method, or of a part in it. A new part goes into one of these modules, or its module into a line.
MODULES: dict[str, tuple[ModuleType, ...]] = {
    "target": (targets,),
    "kernel": (kernels, learned_noise),
    "decoding": (decoding,),
    "plan": (plans,),
    "solver": (solvers,),
    "preview": (preview,),
    "shaping": (shaping, length_shaping),
    "advantage": (group, baselines, reward_weights, correctness),
    "selection": (selection,),
    "log_ratio": (ratios,),
    "surrogate": (surrogates, forward_process, sequence_losses, token_losses, actor_critic),
    "step_weight": (step_weights,),
    "reduction": (reductions,),
    "kl": (kl,),
    "kl.schedule": (schedules,),
    "reference": (references,),
    "tuning": (best_path,),
    "times": (noised_finals,),
    "lag": (old_policy,),
    "backprop": (reward_gradient,),
    "relaxation": (gumbel_softmax,),
    "edit": (latent_edits,),
    "adapted": (adapted,),
    "draws": (groups, trees, lookahead),
    "spread": (token_credit,),
    "curriculum": (order, categories, history, prediction),
    "redraw": (resampling,),
    "replay": (replay,),
    "value": (gae,)}
# What parts return or hold, and what no recipe names.
_RECORDS = {plans.Schedule, lookahead.Branch, reward_gradient.ResumableStates, reward_gradient.RewardGradientRollout,
            latent_edits.Edits,
            actor_critic.Seen, targets.Target,
            targets.Traces, targets.RecordedPairs}  # what a run makes of completions and of noised finals
PLACES: dict[Any, str] = {cls: place for place, modules in MODULES.items() for module in modules
                           for cls in vars(module).values() if dataclasses.is_dataclass(cls)
                           and cls.__module__ == module.__name__ and cls not in _RECORDS}
TYPES: dict[str, type] = {cls.__name__: cls for cls in PLACES}
assert len(TYPES) == len(PLACES), "two parts have one name"
# Classes that parts of a place extend, where they have something in common besides their call.
BASES: dict[str, type] = {
    "target": targets.Target, "surrogate": Surrogate, "log_ratio": LogRatio, "kl": Penalty, "advantage": AdvantageRule,
    "shaping": Shaping, "spread": TokenCredit}
# Types of objects that Python gave in this process, by the names that its runs record: FILE.py:NAME, or OBJECT + NAME.
GIVEN: dict[str, type] = {}
OBJECT = "object:"
# Groups of entry points by which an installed package adds presets and parts.
PRESET_GROUP, PART_GROUP = "flowgrpo.methods", "flowgrpo.parts"
# Fields that some group of some method has, by which recipes name parts.
NAMES: set[str] = {"target"} | {field.name for cls in (Denoising, TextGeneration, Credit, Loss, *vars(targets).values())
                                if dataclasses.is_dataclass(cls) for field in dataclasses.fields(cls)}


def of_place(place: str) -> list[str]:
    """Return the names of the parts that go to a place, sorted."""
    return sorted(cls.__name__ for cls, position in PLACES.items() if position == place)
