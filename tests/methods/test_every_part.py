"""Targets, and every part in every place on every kind of model: refused in a line, or trained otherwise."""

import functools
import json
from typing import Any

import pytest
import torch

from flowgrpo.errors import UserError
from flowgrpo.methods import preset, presets, reads, registry
from flowgrpo.methods.groups import Denoising
from flowgrpo.methods.method import Method
from flowgrpo.methods.overlay import with_parts
from flowgrpo.methods.targets import (
    JointDensity,
    LatentEdits,
    NoisedFinals,
    RecordedPairs,
    RecordedSteps,
    RewardGradient,
)
from flowgrpo.methods.validate import resolve
from flowgrpo.rollouts.targets import TARGETS
from flowgrpo.samplers.noised_finals import GridTimes, Stratified
from flowgrpo.text.targets import Completions, ImageTokens, RecordedCompletions, RelaxedTraces, TextGeneration, Traces
from tests.helpers import tiny, tiny_runs, tiny_text
from tests.helpers.refusals import refused

OF_PIPELINES = RecordedSteps(), JointDensity(), NoisedFinals(), RecordedPairs(), RewardGradient(), LatentEdits()
OF_TEXTS = Completions(), ImageTokens(), Traces(), RelaxedTraces(), RecordedCompletions()


def test_a_target_belongs_to_one_kind_of_rollout():
    for own, other, targets in ((Denoising(), TextGeneration(), OF_PIPELINES), (TextGeneration(), Denoising(),
                                                                               OF_TEXTS)):
        for target in targets:
            assert Method(own, target).target == target
            with pytest.raises(ValueError, match=f"{type(target).__name__} is no target of {type(other).__name__}"):
                Method(other, target)


def test_every_target_of_a_pipeline_has_its_rollouts():
    assert {type(target) for target in OF_PIPELINES} <= {*TARGETS}


def test_fields_of_groups_have_different_names():
    for name in ("mix_grpo", "diffusion_nft", "draft", "expo", "grpo", "drakes"):
        method = preset(name)
        groups = (method.rollout, method.target, method.credit, method.loss)
        assert len(method.parts()) == sum(len(vars(group)) for group in groups) + 4


def test_a_part_is_replaced_wherever_it_stands_and_whole_groups_come_first():
    method = Method().having(times=Stratified(2), target=NoisedFinals(), roots=1)
    assert (method.target, method.rollout.roots) == (NoisedFinals(Stratified(2)), 1)
    refused("a method that trains recorded steps reads no times", Method().having, times=GridTimes(), error=ValueError)


def test_a_recipe_names_the_target_and_its_parts():
    parts = {"times": {"share": 0.6}, "target": {"type": "NoisedFinals"}}
    assert with_parts(preset("mix_grpo"), parts).target == NoisedFinals(GridTimes(share=0.6))
    with pytest.raises(UserError, match="Completions is no target of Denoising"):
        with_parts(preset("mix_grpo"), {"target": {"type": "Completions"}})


def test_recorded_pairs_replace_noised_finals():
    config = tiny.config(method="diffusion_dpo", preferences="pairs.jsonl", train__group=2)
    assert resolve(config).target == RecordedPairs(Stratified(4))
    assert resolve(tiny.config(method="diffusion_dpo", train__group=2)).target == NoisedFinals(Stratified(4))


@pytest.mark.parametrize("target", [*OF_PIPELINES, *OF_TEXTS])
def test_what_is_left_unread_is_the_name_of_a_part(target):
    method = Method(TextGeneration() if isinstance(target, OF_TEXTS_TYPES) else Denoising(), target)
    assert target.unread <= {*method.parts()} and {*target.takes} <= {*method.parts()} - target.unread


OF_TEXTS_TYPES = tuple(type(target) for target in OF_TEXTS)


def test_every_part_is_for_what_some_target_offers_and_every_offer_has_a_part():
    offered = {word for target in (*OF_PIPELINES, *OF_TEXTS) for word in target.offers}
    read = {getattr(registry.TYPES[name], "reads_target", "") for name in registry.TYPES}
    assert read - {""} == offered


def test_a_part_of_a_users_own_says_what_it_is_for(tmp_path):
    (tmp_path / "own.py").write_text("""from dataclasses import dataclass
from flowgrpo.objectives.ratios import PlainRatio

@dataclass(frozen=True)
class Mine(PlainRatio):
    reads_target = "noised finals"
""")
    mine = {"log_ratio": {"type": f"{tmp_path / 'own.py'}:Mine"}}
    assert type(resolve(tiny.config(method="diffusion_nft", parts=mine)).loss.log_ratio).__name__ == "Mine"
    with pytest.raises(UserError, match="got Mine, which reads noised finals or recorded pairs, but the method trains"):
        resolve(tiny.config(method="flow_grpo", parts=mine))


def test_a_plan_says_truly_which_steps_draw_noise():
    for name in registry.of_place("plan"):
        plan = registry.TYPES[name](**{"Single": {"step": 1}}.get(name, {}))
        planned = plan(20, 0, 0)
        for schedule in planned if isinstance(planned, tuple) else (planned,):
            noisy = {20: "every", 19: "every", 0: "none"}.get(len(schedule.stochastic), "some")
            assert Denoising(plan=plan).noisy == noisy, name


ALL = {*registry.MODULES, "roots", "strides"}
# Hosts of everything that is trained of every kind of model, and the places whose parts are trained there.
TRAINED = {("flow", "mix_grpo"): ALL - {"advantage", "kl.schedule", "reference", "curriculum", "redraw"},  # as tokens
           ("flow", "reinflow"): {"kernel", "plan", "target"},
           ("flow", "diffusion_nft"): {"times", "lag", "log_ratio", "surrogate", "step_weight"},
           ("flow", "draft"): {"kernel", "plan", "backprop", "preview", "selection"},
           ("flow", "expo"): {"kl", "value", "edit", "shaping", "solver"},
           ("vp", "ddpo"): {"kernel", "roots", "target"},
           ("tokens", "grpo"): ALL,
           ("masks", "grpo"): {"log_ratio", "reduction", "value", "kl"},
           ("masks", "drakes"): {"selection", "curriculum"}}
# What parts need that have no default for it, or whose default does nothing here.
SETTINGS: dict[str, dict[str, Any]] = {
    "Single": {"step": 1}, "Sliding": {"size": 1}, "LateStep": {"first": 0.0},
    "RandomLast": {"mean": 0.5, "deviation": 0.0},
    "Binary": {"threshold": 0.2}, "LengthSwitch": {"right": 0.1, "top": 1.0}, "ExitDecay": {"right": 0.1},
    "BestWorst": {"n": 2}, "MaxVariance": {"n": 2}, "Beyond": {"quantile": 0.9},
    "DualClip": {"low": 5e-5, "high": 5e-5}, "Adaptive": {"target": 0.001}, "Linear": {"last": 0.0},
    "LayerTuning": {"weight": 0.1}, "Lag": {"start": 0.5, "most": 0.5}, "Preview": {"pool": 6, "steps": 2},
    "EarlyExits": {"exit": "=", "close": "="}, "Hints": tiny_runs.HINTED["redraw"] | {"fail": 1.0},
    "HintLength": {"text": "{prompt}{hint}"}, "Expansion": {"text": "{prompt}7"}, "TeacherAnswers": {"fail": 1.0},
    "Retention": {"after": 1}, "LikelihoodConsistency": {"right": 0.1},
    "SegmentTree": {"every": 1}, "Tree": {"tokens": 1}, "Edit": {"width": 4},
    "Unconfident": {"right": 0.1}, "Decoupled": {"right": 0.1}, "Balanced": {"right": 0.48},
    "ForwardCorrected": {"misses": 0.3},
    "Pruning": {"pool": 6, "step": 1}, "SpanDecoding": {"opens": list(range(3, 12)), "inside": 0.2},
    "StepScores": {"ends": "1"}, "SecondAttempt": {"again": "="}, "PrunedDraws": {"tokens": 1},
    **dict.fromkeys(("ResampleCorrect", "Consistent"), {"n": 2, "rewards": ["score"], "right": 0.1}),
    **dict.fromkeys(("FlowMatching", "GuidanceDistillation", "SelfAnswers"), {"source": {"right": 0.1}}),
    "PassRate": {"right": 0.1}, "PreferencePairs": {"source": {"path": tiny_text.PAIRS}},
    "Variations": {"right": 0.1, "share": 1.0, "template": "{prompt}{solution}"},
    "Explained": {"right": 0.1, "template": "{prompt}{right}{wrong}"},
    "WarmupCosine": {"warmup": 0}, "GradientNorms": {"warmup": 1}}
KL = {"kl": {"weight": 0.1}}
# What has to be there besides, of the host as well, for a part to be of effect.
BESIDE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("EMA", "PreviousPolicy", "WeightAverage", "Teacher", "Teachers", "Soup", "Linear",
                     "Adaptive"), KL),
    "Pooled": {"curriculum": {"type": "Knapsack"}}, "AdditionalGroups": {"advantage": {"type": "PriorBlend"}},
    "OneStep": {"plan": {"count": 2}}, "Preview": {"roots": None},
    "SegmentTree": {"draws": {"type": "Tree", "tokens": 1}}, "Pruning": {"roots": None},
    **dict.fromkeys(("Calibrated", "ExpertReward", "TeacherAnswers"), {"decoding": {"expert": 1}}),
    "PolicyShaping": {"expansion": {"type": "Expansion", "text": "{prompt}7"}}}
VALUES = {"tail": 0.5, "roots": 2, "strides": [1, 2]}
# What is the host's own under another name: one reward has nothing to be weighed against, and need not rise; of two
# prompts of which one is flat, both are as difficult; the noise of FlowDDIM is 0, a Teacher without a model and a
# Soup of none are the base, in two epochs no prompt has a history or comes again, no two of the few prompts here are a
# pair, and no two completions share a step.
SAME = {"Influence", "MergedSteps", "Soup", "Hypervolume", "HardPrompts", "ODE", "Teacher", "Teachers",
        "AdditionalGroups", "OppositePairs", "Episodic",
        "PicturePairs"}  # needs images: tests/training/test_pair_term.py
# What is first seen in a second epoch, or where a prompt comes again, in the third.
LATER = {"EMA", "PreviousPolicy", "WeightAverage", "Linear", "Adaptive", "Lag", "ThompsonSampling", "Knapsack",
         "Pooled", "ValueTracker", "CategoryBandit", "VarianceSampling",
         "InformationGain", "Retention", "OppositePairs", "PredictedDifficulty", "GroupReplay", "GradientVariance",
         "OutcomeHead", "Variations"}


def laid(name: str, part: dict[str, Any]) -> dict[str, Any]:
    """The parts of a recipe that sets one part, or one value, on what it needs besides."""
    place, beside = place_of(name), BESIDE.get(name, {})
    if place == "kl.schedule":
        return {"kl": KL["kl"] | {"schedule": part}}
    if place.startswith("data."):
        return {"data": {"type": "NextToken", place.removeprefix("data."): part}}
    return beside | {place: part | ({"weight": 0.1} if place == "kl" else {})}


def place_of(name: str) -> str:
    return registry.PLACES.get(name, name)


def recipe(name: str) -> dict[str, Any]:
    """`laid` of a part by its name, or of one of VALUES."""
    return BESIDE.get(name, {}) | {name: VALUES[name]} if name in VALUES else laid(
        name, {"type": name} | SETTINGS.get(name, {}))


def answer(kind: str, host: str, parts: dict[str, Any], **options):
    """The method, or the refusal's one line."""
    try:
        return resolve(tiny_runs.config(kind, host, parts, **options), kind)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)


def hosts(kind: str) -> list[str]:
    found = presets.presets_for("flow" if kind == "vp" else kind)
    return [name for name in found if not isinstance(answer(kind, name, {}), str)]


@functools.cache
def trained(kind: str, host: str, parts: str, epochs: int, passes: int):
    """(metrics, weights) after so many epochs of so many passes; parts: as JSON."""
    short = {} if kind in tiny_runs.TEXTS else {"train__steps": 4}
    settings = tiny_runs.config(kind, host, json.loads(parts), train__inner_epochs=passes, **short)
    made = tiny_runs.trainer(kind, settings)
    return tiny_runs.epochs(made, epochs), made.policy.weights.snapshot()


@pytest.mark.parametrize("kind", tiny_runs.KINDS)
def test_every_part_is_taken_or_refused_in_a_line_by_every_host(kind):
    for host in hosts(kind):
        own = answer(kind, host, {})
        for name in (*registry.TYPES, *VALUES):
            found, place = answer(kind, host, recipe(name)), place_of(name).partition(".")[0]
            if isinstance(found, str) or found == own:
                continue
            before, after = (method.parts() | {"target": method.target} for method in (own, found))
            assert place in (*reads.places(found), "target") or after[place] == before[place], (host, name)


@pytest.mark.parametrize("kind, host", TRAINED)
def test_every_part_that_is_taken_trains_otherwise(kind, host):
    tried = 0
    for name in (*registry.TYPES, *VALUES):
        if name in SAME or (host, name) == ("expo", "Balanced") or place_of(name) not in TRAINED[kind, host]:
            continue
        base, parts = BESIDE.get(name, {}), recipe(name)
        # In a first pass all ratios are 1.
        length = 1 + (name in LATER) + 2 * (name == "SmoothStandardised"), 1 + (
            place_of(name) in ("surrogate", "log_ratio")) + (name == "LikelihoodFloor")  # where a good text has fallen
        own, found = answer(kind, host, base), answer(kind, host, parts)
        if isinstance(found, str) or found == own:
            continue
        (metrics, weights), (others, moved) = (trained(kind, host, json.dumps(each), *length) for each in (base, parts))
        assert metrics != others or any(not torch.equal(moved[key], weights[key]) for key in weights), name
        tried += 1
    assert tried


@pytest.mark.parametrize("kind, host, parts, place", [
    *(("tokens", "grpo", {name: part}, name) for name, part in {
        "tail": 0.5, "roots": 2, "strides": [1, 2], "plan": {"type": "NoSteps"},
        "solver": {"type": "DPMSolver2M"}, "preview": {"type": "Preview"}, "times": {"type": "GridTimes"},
        "edit": {"type": "Edit"}, "step_weight": {"type": "Sigma"},
        "lag": {"most": 0.5}}.items()),
    ("flow", "mix_grpo", {"draws": {"type": "Tree"}}, "draws"),
    ("flow", "mix_grpo", {"reduction": {"type": "SequenceMean"}}, "reduction"),
    ("flow", "diffusion_nft", {"kernel": {"level": 0.9}}, "kernel"),
    ("flow", "diffusion_nft", {"spread": {"type": "StepGroups"}}, "spread"),
    ("flow", "flow_grpo", {"solver": {"type": "DPMSolver2M"}}, "solver"),
    ("flow", "draft", {"advantage": {"scale": "batch"}}, "advantage"),
    ("flow", "draft", {"shaping": {"type": "WinRate"}}, "shaping"),
    ("masks", "drakes", {"redraw": {"type": "DynamicSampling"}}, "redraw")])
def test_a_part_that_is_set_and_not_read_is_refused_with_those_that_are(kind, host, parts, place):
    told = answer(kind, host, parts)
    assert f" reads no {place}: got parts.{place} " in told and ", leave it out; it has: " in told


def test_a_value_that_the_host_has_already_is_no_setting():
    for parts in ({"tail": 1.0, "strides": [1]}, {"spread": None}, {"redraw": None}):
        assert answer("flow", "mix_grpo", parts) == answer("flow", "mix_grpo", {})


def test_a_preset_of_which_a_part_is_read_is_taken():
    assert answer("flow", "draft+knapsack_rl", {}) == with_parts(preset("draft", "knapsack_rl"), {})
