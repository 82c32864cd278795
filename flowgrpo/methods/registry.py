"""Parts that a recipe can name, by their place in a method: parts of one place can stand for each other."""

from __future__ import annotations

import dataclasses
from types import ModuleType

from flowgrpo.advantages import places as advantages
from flowgrpo.curriculum import places as curriculum
from flowgrpo.methods import adapted, data_sources, supervised, targets
from flowgrpo.methods.by_name import ByName
from flowgrpo.methods.groups import Credit, Denoising, Loss
from flowgrpo.objectives import places as objectives
from flowgrpo.samplers import places as samplers

# The field of a Method, or of a part in it, and the modules of its parts. A new part goes into one of these modules, or
# its module into the table of its folder; one of `text` or `contrib` goes into LATER.
_ORDER = ("target", "kernel", "decoding", "plan", "solver", "tail", "preview", "pruning", "shaping", "advantage",
          "selection", "log_ratio", "surrogate", "step_weight", "reduction", "kl", "kl.schedule", "reference",
          "rehearsal", "tuning", "data", "data.source", "data.balance", "data.token_weight", "times", "lag", "backprop",
          "relaxation", "edit", "adapted", "draws", "spread", "curriculum", "expansion", "redraw", "replay", "value",
          "progress")
_OWN: dict[str, tuple[ModuleType, ...]] = {
    "target": (targets,), "data": (supervised,), "data.source": (data_sources,), "adapted": (adapted,)}
_ALL = advantages.MODULES | curriculum.MODULES | objectives.MODULES | samplers.MODULES | _OWN
MODULES: dict[str, tuple[ModuleType, ...]] = {place: _ALL.get(place, ()) for place in _ORDER}
assert _ALL.keys() <= MODULES.keys(), "a place is missing"
# Parts of `text` and `contrib` by place and module, which are loaded when one is named; a test compares.
LATER: dict[str, dict[str, str]] = {
    "target": {"text.targets": "Completions RelaxedTraces"},
    "decoding": {
        "text.samplers.decoding": "Decoding WithAnswers Unmasking",
        "contrib.annealing": "AnnealedDecoding SpanDecoding"},
    "shaping": {
        "text.credit": "ExpertReward LengthSwitch ExitDecay",
        "contrib.episodic": "Episodic",
        "contrib.consistency": "LikelihoodConsistency"},
    "advantage": {
        "contrib.risk": "RiskAverse",
        "contrib.reward_weights": "Influence Hypervolume HardPrompts ForwardCorrected",
        "contrib.reshaped": "Difficulty Confidence Unconfident Consistency"},
    "selection": {"contrib.downsampling": "ResampleCorrect Consistent"},
    "surrogate": {
        "text.losses.token_losses": "EntropyBonus HighEntropy ConflictTokens LikelihoodFloor ExpertMixture Calibrated "
                                    "RandomPolicyValue RewardLabels",
        "contrib.token_weights": "TokenWeights",
        "contrib.policy_shaping": "PolicyShaping"},
    "rehearsal": {"contrib.rehearsal": "Rehearsal"},
    "relaxation": {"text.samplers.gumbel_softmax": "GumbelSoftmax"},
    "draws": {
        "text.samplers.groups": "Independent EarlyExits SecondAttempt Tree PrunedDraws",
        "text.samplers.lookahead": "BranchingLookahead",
        "contrib.branching": "CriticalTokens SemanticBranches"},
    "spread": {"text.credit": "StepScores"},
    "curriculum": {
        "contrib.categories": "CategoryBandit",
        "contrib.prediction": "PredictedDifficulty",
        "contrib.variants": "Variations"},
    "redraw": {"contrib.hint_length": "HintLength", "text.teacher_answers": "TeacherAnswers"},
    "replay": {"contrib.group_replay": "GroupReplay"}}
# What parts return or hold, and what no recipe names; the last is what a run makes of noised finals.
_RECORDS = objectives.RECORDS | samplers.RECORDS | {supervised.DataLoss, supervised.NoisedData, targets.Target,
                                                    targets.RecordedPairs}


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
BASES: dict[str, type] = advantages.BASES | objectives.BASES | {"target": targets.Target, "data": supervised.DataLoss}
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
