"""Values that a part does not take: named in one line with the part's place, as a recipe's author sees it."""

import math
import re
from typing import Any

import pytest

from flowgrpo.methods import preset, registry
from flowgrpo.methods.overlay import with_parts
from tests.helpers.refusals import message
from tests.methods.test_every_part import laid
from tests.methods.test_methods import HAVING

Fields = dict[str, Any]
# By part: fields out of range, of which the message names each; or fields and what is said of them.
WRONG: dict[str, list[Fields | tuple[Fields, str]]] = {
    # kernels, solvers and grids
    "FlowSDE": [{"level": -0.1}], "DanceSDE": [{"level": -0.1}], "CPS": [{"level": 1.1}, {"level": -0.1}],
    "VPCPS": [{"level": 1.1}], "FlowDDIM": [{"eta": 1.1}], "DDIM": [{"eta": 1.1}, {"eta": math.nan}],
    "LearnedNoise": [{"low": 0.0}, {"low": 0.5, "high": 0.4}, {"hold": 2.0}, {"width": 0}],
    "TailPoints": [{"share": 0}],
    # plans
    "Sliding": [{"order": "slow"}, {"size": 0}, {"stride": 0}, {"every": 0}, {"every_min": 0}, {"start": -1},
                {"rate": -0.1}],
    "RandomSubset": [{"fraction": 0}, {"fraction": -0.1}, {"fraction": 1.1}, {"fraction": math.nan}],
    "Branches": [{"branch": 1}, {"every": 0}, {"pruned": -1}, ({"splits": []}, "Branches: splits"),
                 ({"splits": [3, 0]}, "Branches: splits"), ({"splits": [0, 0]}, "Branches: splits")],
    "GrowingTail": [{"first": 0.9, "final": 0.5}],
    "LastSteps": [{"count": 0}], "LateStep": [{"first": 1.0}],
    "RandomLast": [{"mean": 0.0}, ({"mean": 0.5, "deviation": -1.0}, "`deviation` -1.0")],
    "Preview": [{"pool": 1}, {"steps": 0},
                ({"precision": "int4"}, "Preview: precision is 'int4', expected one of full, auto, int8, fp8, nvfp4")],
    # noised finals and latent edits
    "GridTimes": [{"every": 0}, {"share": 1.1}], "RandomGridTimes": [{"share": 0.0}],
    "Stratified": [{"count": 0}, {"low": 0.5, "high": 0.5}],
    "Lag": [{"start": 0.5, "most": 0.4}, {"slope": -1.0}],
    "Edit": [{"bound": 0}, {"std": -1.0}, {"width": 6}, {"width": 0}, {"depth": 0}, {"candidates": 0}],
    # log-ratios and surrogates
    "Matching": [{"power": 0.0}],
    "Clip": [{"low": -0.1, "high": 0.1}, {"low": 1.1, "high": 0.1}, {"low": 0.1, "high": -0.1}, {"low": math.nan}],
    "DualClip": [{"low": -0.1, "high": 0.1}, {"dual": 1.0}],
    "DynamicClip": [{"low": 1.2}, {"high": -1}, {"cap": 0.5}],
    "AdaptiveClip": [{"low": 0.2, "high": 0.1}, {"sensitivity": -1}, {"low": -0.1}, {"low": 1.5}],
    "ActorCritic": [{"critic": -0.1}, {"low": -1.0}, {"through": -1.0}, {"ratio": -1.0}, {"through": 0.0}],
    "NegativeAware": [{"beta": 0.0}], "CentredReward": [{"most": -1.0}], "GroupPreference": [{"low": 2.0}],
    "Preference": [{"beta": -1.0}, {"similarity": -1.0}],
    "RewardLabels": [({"form": "both"}, "form is 'both', expected one of anchor, each, leave_one_out"), {"scale": 0}],
    "PairLoss": [({"form": "kto"}, "form is 'kto', expected one of logistic, squared, hinge"), {"beta": 0},
                 {"smoothing": 0.5}, {"offset": -1.0}],
    "TaperedReinforce": [{"most": 0}], "NegativeAwareText": [{"weight": "both"}, {"floor": 0}],
    "Discriminative": [{"score": "prob"}, {"delta": -1}], "Regressed": [{"least": 0}],
    "PairwisePreference": [{"best": 0}],
    "LayerTuning": [({"weight": -1}, "LayerTuning: weight is -1, expected 0 or more"),
                    ({"by": "reward"}, "LayerTuning: by is 'reward', expected advantage or progress")],
    # KL and references
    "SampledKL": [{"weight": -1}, {"estimator": "k4"}], "OutputError": [{"weight": -1}],
    "GaussianKL": [{"weight": -1}],
    "SpanKL": [{"factors": []}, {"factors": [0, 0]}, {"factors": [1, -1]}],
    "Linear": [{"last": -0.1}], "Adaptive": [{"target": 0}, {"target": 1, "factor": 1}],
    "EMA": [{"decay": 1.5}], "PreviousPolicy": [{"every": 0}], "WeightAverage": [{"every": 0}, {"size": 0}],
    "Soup": [({"models": ["a", "b"], "shares": [0.5, 0.6]}, "Soup: shares are [0.5, 0.6] for 2 models, expected")],
    "SelfTeacher": [
        ({"feedback": "answer", "template": "{prompt}{right}="}, "template has prompt, right, expected answer, prompt"),
        ({"feedback": "hint"}, "feedback is 'hint', expected one of sibling, contrast, answer, none")],
    # advantages
    "Advantage": [{"scale": "std"}, {"order": "sum"}, {"clamp": 0}, {"trim": 0.5}, {"trim": -0.1}, {"least": 33},
                  {"buffer": 8, "least": 0}],
    "VirtualBest": [{"clamp": 0}], "Conditional": [{"mu": 1.5}, {"metric": "width"}, {"upper": -1}],
    "ShiftedMean": [{"shift": math.inf}], "SameNoise": [{"scale": "group"}], "Decoupled": [{"temperature": 0}],
    "Signed": [({"positive": 0, "negative": 0}, "expected 0 or more, and one of them above 0")],
    "SmoothStandardised": [{"clamp": 0}],
    "ValueTracker": [{"half": 0}, {"least": 0.9, "most": 0.8}, {"prior": -0.1}, {"evidence": 0}, {"floor": -1}],
    "PriorBlend": [{"keep": 2}, {"evidence": 0}],
    "Recall": [{"kept": 0}, {"steps": 0}, {"batch": 0}, {"lr": 0}],
    "Progress": [{"weight": -1.0}, {"outcome": -0.1}, {"discount": 1.1}],
    "SegmentChain": [{"cut": 0.0}, {"samples": 0}], "StepGroups": [{"every": 0}, {"gamma": 0.0}],
    "MergedSteps": [{"every": 0}], "Exploring": [{"kappa": 1}, {"alpha": -1}],
    "Planning": [({"first": 0}, "expected 0 or more each, and a first decision or an id")],
    # texts: draws, values, losses and lengths
    "Decoding": [{"temperature": 0}, {"top_p": 0}, {"min_p": 1.5}, {"top_k": -1}],
    "Unmasking": [{"per_step": 0}, {"shrink": 0}, {"block": -1}, {"order": "left"}, {"temperature": 0}],
    "GumbelSoftmax": [{"temperature": 0.0}, {"last": 0}, {"kl": -1.0},
                      ({"schedule": {"type": "Linear", "last": 0.0}}, "above 0"),
                      ({"schedule": {"type": "Adaptive", "target": 0.1}}, "expected Linear or null")],
    "BranchingLookahead": [{"likely": 2.0}], "PrunedDraws": [{"begun": 1}],
    "ValueHead": [{"gamma": 1.1}, {"decay": -0.1}, {"clip": 0.0}, {"passes": 0}],
    "OutcomeHead": [{"bounds": []}, {"bounds": [1.0, 0.0]}, {"lr": 0.0}],
    "StepScores": [({"kind": "blame", "gain": 1.0}, "gain is 1.0 with kind 'blame'")],
    "LengthSwitch": [{"top": 2.0}], "Overlong": [{"share": 0}],
    "EntropyBonus": [({"surrogate": {"type": "DivergenceMask"}}, "EntropyBonus: surrogate is DivergenceMask")],
    "LikelihoodFloor": [({"surrogate": {"type": "Regressed"}}, "LikelihoodFloor: surrogate is Regressed")],
    # distillation
    "ConsistencyDistillation": [{"weight": 0.0}, {"scale": -1}, {"jumps": 1}, {"decay": 1.5}, {"delta": 0.0}],
    "DistributionMatching": [{"weight": 0.0}, {"batch": 0}, {"text": "tuned"}, {"blend": 1.5}, {"fake_updates": 0}],
    # selection and shaping
    "BestWorst": [{"n": 0}, {"n": -2}, ({"n": 3}, "BestWorst: n is 3, expected an even number")],
    "MaxVariance": [{"n": 1}, ({"n": 4, "last": 3}, "last is 3, expected at least n, 4")],
    "Extremes": [({"low": 1, "high": 0}, "low is 1 and high 0, expected low <= high")], "Beyond": [{"quantile": 1}],
    "WidthPruning": [{"of": "leaves"}, {"depths": "first"}, {"share": 0}],
    "Unlikely": [{"beta": 1.2}], "WinRate": [{"margin": -1}], "Compressed": [{"high": 0}, {"low": 0}],
    "BradleyTerry": [{"scale": 0.0}],
    # supervised terms and prompts
    "WarmupCosine": [{"peak": 0.1, "valley": 0.2}], "GradientNorms": [{"gamma": 0}], "FixedWeights": [{"data": 0}],
    "Convergence": [{"window": 0}], "OneToken": [{"wrong": 0.1}], "EntropyAware": [{"scale": 0}],
    "PassRate": [({"failed": False, "solved": False}, "all false")],
    "NextToken": [({"apart": True}, "set data.source: {type: PassRate}"),
                  ({"condition": "{source}"}, "expected a text with {prompt}"),
                  ({"condition": "{prompt} {other}"}, "expected a text with {prompt}"),
                  {"source": {"type": "Recorded", "path": "own.jsonl"}, "batch": 0}],
    "FlowMatching": [({"apart": True, "balance": {"type": "FixedWeights", "data": 0.5}}, "has no balance"),
                     ({"distance": "l1"}, "distance is 'l1', expected one of squared, smooth_l1")],
    "GuidanceDistillation": [
        ({"scale": 1.0, "base": False}, "the teacher has the student's weights and its guidance")],
    "AlignedChains": [{"contrast": -1}],
    "Explained": [({"template": "{prompt}{right}"}, "template has prompt, right, tries is 2")],
    "PreferencePairs": [({"source": {"type": "PassRate"}}, "its source is a file of pairs and it weighs no rewards")],
    "PicturePairs": [({"beta": 0.5}, "its source is a file of pairs and it weighs no rewards")],
    "Expansion": [({"text": "no prompt"}, "Expansion: "), {"scale": -1.0}],
    "Hints": [({"shares": [0.5, 0.25]}, "Hints: shares are [0.5, 0.25], expected rising"), {"after": 2.0},
              ({"shares": [0.0]}, "Hints: shares are [0.0], expected rising"), ({"text": "{hint}"}, "Hints: text is")],
    "DynamicSampling": [{"turns": 1}], "ExtraRollouts": [{"most": 0}],
    "CategoryBandit": [{"temperature": 0.0}, {"window": -1}], "VarianceSampling": [{"share": 2.0}],
    "PredictedDifficulty": [{"fresh": 2.0}, {"references": 0}], "InformationGain": [{"others": 2.0}],
    "Retention": [{"keep": 0}], "OppositePairs": [{"share": 0.0}], "Knapsack": [{"each": 0}, {"keep": 2.0}],
    "GradientVariance": [{"each": 0}, {"keep": 2.0}],
    "ThompsonSampling": [{"candidates": 0}, {"target": 1.5}, {"keep": -0.1}, {"prior": 0.0}],
    "Variations": [({"share": 0.0}, "Variations: share is"), ({"kept": 0}, "Variations: share is"),
                   ({"template": "{prompt}"}, "Variations: share is")],
    "Pooled": [({"scale": "batch"}, "Pooled: scale is 'batch', expected one of"), {"clamp": 0.0}]}
# Their messages name the field alone.
UNNAMED = {"Advantage", "Pooled", "VirtualBest", "SmoothStandardised"}


@pytest.mark.parametrize("name, row", [(name, row) for name, rows in WRONG.items() for row in rows])
def test_a_value_out_of_range_is_named_with_its_place(name, row):
    fields, said = row if isinstance(row, tuple) else (row, "expected")
    part, place = {"type": name} | fields, registry.PLACES[name].partition(".")[0]
    parts = {"kl": part} if registry.PLACES[name] == "kl" else laid(name, part)
    told, (key, value) = message(with_parts, preset(HAVING.get(place, "flow_grpo")), parts), [*fields.items()][-1]
    assert told.startswith(f"parts.{place}") and said in told
    assert f"{name}: " in told or name in UNNAMED
    if said == "expected":
        assert re.search(rf"\b{key} (is )?{re.escape(repr(value))}", told)
