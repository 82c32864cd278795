"""The parts that a recipe can name, by their place in a method: parts of one place can stand for each other."""

from __future__ import annotations

import dataclasses
from types import ModuleType

from flowgrpo import advantages, selection
from flowgrpo.objectives import (
    actor_critic,
    completion,
    forward_process,
    kl,
    ratios,
    schedules,
    step_weights,
    surrogates,
    tokenwise,
)
from flowgrpo.parts import (
    adapted,
    baselines,
    correctness,
    critic,
    curriculum,
    hints,
    influence,
    knapsack,
    lag,
    layer_tuning,
    length_terms,
    lookahead,
    paired,
    pooled,
    recall,
    redraws,
    reductions,
    references,
    shaping,
    spreads,
    text_groups,
    text_trees,
)
from flowgrpo.samplers import (
    backprop,
    chains,
    edits,
    forward,
    kernels,
    noise_net,
    plans,
    preview,
    relaxation,
    solvers,
    tokens,
)

# By the field of a Method, or of a part in it. A new part goes into one of these modules, or its module into a line.
MODULES: dict[str, tuple[ModuleType, ...]] = {
    "kernel": (kernels, tokens, noise_net),
    "plan": (plans,),
    "solver": (solvers,),
    "preview": (preview,),
    "shaping": (shaping, length_terms),
    "advantage": (advantages, baselines, influence, pooled, correctness, paired),
    "selection": (selection,),
    "log_ratio": (ratios,),
    "surrogate": (surrogates, forward_process, completion, tokenwise, actor_critic),
    "step_weight": (step_weights,),
    "reduction": (reductions,),
    "kl": (kl,),
    "kl.schedule": (schedules,),
    "reference": (references,),
    "tuning": (layer_tuning,),
    "times": (forward,),
    "lag": (lag,),
    "backprop": (backprop, relaxation),
    "edit": (edits,),
    "adapted": (adapted,),
    "chain": (chains,),
    "draws": (text_groups, text_trees, lookahead),
    "spread": (spreads,),
    "curriculum": (curriculum, knapsack),
    "redraw": (redraws, hints),
    "value": (critic, recall)}
# What parts return or hold.
_RECORDS = {plans.Schedule, lookahead.Branch, backprop.Unfinished, backprop.Valued, chains.Chain, edits.Edits,
            edits.Seen, edits.Beside}
PLACES: dict[type, str] = {cls: place for place, modules in MODULES.items() for module in modules
                           for cls in vars(module).values() if dataclasses.is_dataclass(cls)
                           and cls.__module__ == module.__name__ and cls not in _RECORDS}
TYPES: dict[str, type] = {cls.__name__: cls for cls in PLACES}
assert len(TYPES) == len(PLACES), "two parts have one name"


def of_place(place: str) -> list[str]:
    """The names of the parts that go to a place, sorted."""
    return sorted(cls.__name__ for cls, own in PLACES.items() if own == place)
