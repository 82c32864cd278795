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
    selection,
    shaping,
    step_credit,
    token_credit,
    trackers,
)
from flowgrpo.advantages.group import AdvantageRule
from flowgrpo.advantages.shaping import Shaping
from flowgrpo.advantages.token_credit import TokenCredit
from flowgrpo.contrib.annealing import parts as annealing
from flowgrpo.contrib.branching import parts as branching
from flowgrpo.contrib.categories import parts as categories
from flowgrpo.contrib.consistency import parts as consistency
from flowgrpo.contrib.downsampling import parts as downsampling
from flowgrpo.contrib.episodic import parts as episodic
from flowgrpo.contrib.group_replay import parts as replay
from flowgrpo.contrib.hint_length import parts as hint_length
from flowgrpo.contrib.policy_shaping import parts as policy_shaping
from flowgrpo.contrib.prediction import parts as prediction
from flowgrpo.contrib.rehearsal import parts as rehearsal
from flowgrpo.contrib.reshaped import parts as reshaped
from flowgrpo.contrib.reward_weights import parts as reward_weights
from flowgrpo.contrib.risk import parts as risk
from flowgrpo.contrib.token_weights import parts as token_weights
from flowgrpo.contrib.variants import parts as variations
from flowgrpo.curriculum import expansion, gradient_variance, history, order, resampling
from flowgrpo.methods import adapted, data_sources, supervised, targets
from flowgrpo.methods.groups import Credit, Denoising, Loss, TextGeneration
from flowgrpo.objectives import (
    actor_critic,
    balance,
    best_path,
    forward_process,
    kl,
    pair_losses,
    ratios,
    reductions,
    references,
    schedules,
    sequence_losses,
    step_weights,
    supervised_weights,
    surrogates,
)
from flowgrpo.objectives.balance import Balance
from flowgrpo.objectives.kl import Penalty
from flowgrpo.objectives.ratios import LogRatio
from flowgrpo.objectives.supervised_weights import TokenWeight
from flowgrpo.objectives.surrogates import Surrogate
from flowgrpo.samplers import (
    grids,
    kernels,
    latent_edits,
    learned_noise,
    noised_finals,
    old_policy,
    plans,
    preview,
    pruning,
    reward_gradient,
    solvers,
)
from flowgrpo.text import teacher_answers as teachers
from flowgrpo.text.credit import expert_reward, length_shaping, step_scores
from flowgrpo.text.losses import random_policy, reward_labels, token_losses
from flowgrpo.text.samplers import decoding, groups, gumbel_softmax, lookahead, pruned, trees

# By the field of a Method, or of a part in it. A new part goes into one of these modules, or its module into a line.
MODULES: dict[str, tuple[ModuleType, ...]] = {
    "target": (targets,),
    "kernel": (kernels, learned_noise),
    "decoding": (decoding, annealing),
    "plan": (plans,),
    "solver": (solvers,),
    "tail": (grids,),
    "preview": (preview,),
    "pruning": (pruning,),
    "shaping": (shaping, length_shaping, episodic, consistency, expert_reward),
    "advantage": (group, baselines, trackers, risk, reward_weights, correctness, reshaped),
    "selection": (selection, downsampling),
    "log_ratio": (ratios,),
    "surrogate": (surrogates, forward_process, sequence_losses, token_losses, actor_critic,
                  reward_labels, token_weights, random_policy, pair_losses, policy_shaping),
    "step_weight": (step_weights,),
    "reduction": (reductions,),
    "kl": (kl,),
    "kl.schedule": (schedules,),
    "reference": (references,),
    "rehearsal": (rehearsal,),
    "tuning": (best_path,),
    "data": (supervised,),
    "data.source": (data_sources,),
    "data.balance": (balance,),
    "data.token_weight": (supervised_weights,),
    "times": (noised_finals,),
    "lag": (old_policy,),
    "backprop": (reward_gradient,),
    "relaxation": (gumbel_softmax,),
    "edit": (latent_edits,),
    "adapted": (adapted,),
    "draws": (groups, trees, lookahead, branching, pruned),
    "spread": (token_credit, step_scores),
    "curriculum": (order, categories, gradient_variance, history, prediction, variations),
    "expansion": (expansion,),
    "redraw": (resampling, hint_length, teachers),
    "replay": (replay,),
    "value": (gae,),
    "progress": (step_credit,)}
# What parts return or hold, and what no recipe names.
_RECORDS = {plans.Schedule, lookahead.Branch, reward_gradient.ResumableStates, reward_gradient.RewardGradientRollout,
            latent_edits.Edits, downsampling._Downsampled, balance.Now, supervised_weights.Drawn,
            supervised.DataLoss, supervised.NoisedData, surrogates.Origin,
            actor_critic.Seen, targets.Target,
            targets.Traces, targets.RecordedPairs,
            targets.RecordedCompletions}  # what a run makes of completions and of noised finals
PLACES: dict[Any, str] = {cls: place for place, modules in MODULES.items() for module in modules
                           for cls in vars(module).values() if dataclasses.is_dataclass(cls)
                           and cls.__module__ == module.__name__ and cls not in _RECORDS}
TYPES: dict[str, type] = {cls.__name__: cls for cls in PLACES}
assert len(TYPES) == len(PLACES), "two parts have one name"
# Classes that parts of a place extend, where they have something in common besides their call.
BASES: dict[str, type] = {
    "target": targets.Target, "surrogate": Surrogate, "log_ratio": LogRatio, "kl": Penalty, "advantage": AdvantageRule,
    "shaping": Shaping, "spread": TokenCredit, "data": supervised.DataLoss, "data.balance": Balance,
    "data.token_weight": TokenWeight}
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
