"""Parts that a recipe can name, by their place in a method: parts of one place can stand for each other."""

from __future__ import annotations

import dataclasses
from types import ModuleType

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
from flowgrpo.curriculum import expansion, gradient_variance, history, order, resampling
from flowgrpo.methods import adapted, data_sources, supervised, targets
from flowgrpo.methods.by_name import ByName
from flowgrpo.methods.groups import Credit, Denoising, Loss
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

# By the field of a Method, or of a part in it. A new part goes into one of these modules, or its module into a line;
# one of `text` or `contrib` goes into LATER.
MODULES: dict[str, tuple[ModuleType, ...]] = {
    "target": (targets,),
    "kernel": (kernels, learned_noise),
    "decoding": (),
    "plan": (plans,),
    "solver": (solvers,),
    "tail": (grids,),
    "preview": (preview,),
    "pruning": (pruning,),
    "shaping": (shaping,),
    "advantage": (group, baselines, trackers, correctness),
    "selection": (selection,),
    "log_ratio": (ratios,),
    "surrogate": (surrogates, forward_process, sequence_losses, actor_critic, pair_losses),
    "step_weight": (step_weights,),
    "reduction": (reductions,),
    "kl": (kl,),
    "kl.schedule": (schedules,),
    "reference": (references,),
    "rehearsal": (),
    "tuning": (best_path,),
    "data": (supervised,),
    "data.source": (data_sources,),
    "data.balance": (balance,),
    "data.token_weight": (supervised_weights,),
    "times": (noised_finals,),
    "lag": (old_policy,),
    "backprop": (reward_gradient,),
    "relaxation": (),
    "edit": (latent_edits,),
    "adapted": (adapted,),
    "draws": (),
    "spread": (token_credit,),
    "curriculum": (order, gradient_variance, history),
    "expansion": (expansion,),
    "redraw": (resampling,),
    "replay": (),
    "value": (gae,),
    "progress": (step_credit,)}
# Parts of `text` and `contrib` by place and module, which are loaded when one is named; a test compares.
LATER: dict[str, dict[str, str]] = {
    "target": {"text.targets": "Completions RelaxedTraces"},
    "decoding": {
        "text.samplers.decoding": "Decoding WithAnswers Unmasking",
        "contrib.annealing.parts": "AnnealedDecoding SpanDecoding"},
    "shaping": {
        "text.credit.length_shaping": "LengthSwitch ExitDecay",
        "contrib.episodic.parts": "Episodic",
        "contrib.consistency.parts": "LikelihoodConsistency",
        "text.credit.expert_reward": "ExpertReward"},
    "advantage": {
        "contrib.risk.parts": "RiskAverse",
        "contrib.reward_weights.parts": "Influence Hypervolume HardPrompts ForwardCorrected",
        "contrib.reshaped.parts": "Difficulty Confidence Unconfident Consistency"},
    "selection": {"contrib.downsampling.parts": "ResampleCorrect Consistent"},
    "surrogate": {
        "text.losses.token_losses": "EntropyBonus HighEntropy ConflictTokens LikelihoodFloor ExpertMixture Calibrated",
        "text.losses.reward_labels": "RewardLabels",
        "contrib.token_weights.parts": "TokenWeights",
        "text.losses.random_policy": "RandomPolicyValue",
        "contrib.policy_shaping.parts": "PolicyShaping"},
    "rehearsal": {"contrib.rehearsal.parts": "Rehearsal"},
    "relaxation": {"text.samplers.gumbel_softmax": "GumbelSoftmax"},
    "draws": {
        "text.samplers.groups": "Independent EarlyExits SecondAttempt",
        "text.samplers.trees": "Tree",
        "text.samplers.lookahead": "BranchingLookahead",
        "contrib.branching.parts": "CriticalTokens SemanticBranches",
        "text.samplers.pruned": "PrunedDraws"},
    "spread": {"text.credit.step_scores": "StepScores"},
    "curriculum": {
        "contrib.categories.parts": "CategoryBandit",
        "contrib.prediction.parts": "PredictedDifficulty",
        "contrib.variants.parts": "Variations"},
    "redraw": {"contrib.hint_length.parts": "HintLength", "text.teacher_answers": "TeacherAnswers"},
    "replay": {"contrib.group_replay.parts": "GroupReplay"}}
# What parts return or hold, and what no recipe names.
_RECORDS = {plans.Schedule, reward_gradient.ResumableStates, reward_gradient.RewardGradientRollout, latent_edits.Edits,
            balance.Now, supervised_weights.Drawn, supervised.DataLoss, supervised.NoisedData, surrogates.Origin,
            actor_critic.Seen, targets.Target, targets.RecordedPairs}  # the last is what a run makes of noised finals


def _of_place(place: str) -> dict[str, type | str]:
    """Return the parts of a place by name, those of `text` and `contrib` by the module that has them."""
    parts: dict[str, type | str] = {
        cls.__name__: cls for module in MODULES[place] for cls in vars(module).values()
        if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
        and cls not in _RECORDS}
    return parts | {name: module for module, names in LATER.get(place, {}).items() for name in names.split()}


_BY_PLACE = {place: _of_place(place) for place in MODULES}
PLACES: dict[str, str] = {name: place for place, parts in _BY_PLACE.items() for name in parts}
TYPES: ByName[type] = ByName({name: part for parts in _BY_PLACE.values() for name, part in parts.items()})
assert len(PLACES) == sum(map(len, _BY_PLACE.values())), "two parts have one name"
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
# Fields that some group of some method has, by which recipes name parts; the last three are those of `text`.
NAMES: set[str] = {"target", "decoding", "draws", "relaxation"} | {
    field.name for cls in (Denoising, Credit, Loss, *vars(targets).values()) if dataclasses.is_dataclass(cls)
    for field in dataclasses.fields(cls)}


def of_place(place: str) -> list[str]:
    """Return the names of the parts that go to a place, sorted."""
    return sorted(_BY_PLACE.get(place, ()))


def place_of(part: type) -> str | None:
    """Return the place of a part's class; None of a class that no recipe names."""
    name = part.__name__
    return PLACES[name] if name in PLACES and TYPES[name] is part else None
