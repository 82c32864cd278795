"""What must not change by itself, as files in golden/ have it: resolved methods, help, the configuration's keys, and
metrics of two epochs of every preset."""

import json
import re

import pytest
import torch

from flowgrpo.methods import preset
from flowgrpo.objectives.surrogates import ClippedSurrogate
from tests.helpers import golden_files, tiny_runs


@pytest.mark.parametrize("section, made", [("presets", golden_files.of_presets), ("recipes", golden_files.of_recipes)])
def test_methods_are_what_they_were(section, made):
    assert made() == json.loads(golden_files.kept("methods"))[section]


@pytest.mark.fast
def test_recipes_presets_keys_and_help_are_frozen():
    found = json.loads(golden_files.kept("methods"))
    assert {*found["recipes"]} == {path.stem for path in golden_files.RECIPES.glob("*.yaml")}
    assert {name.split(" ")[0] for name in found["presets"]} == {*golden_files.presets.PRESETS}
    assert golden_files.config().splitlines() == golden_files.kept("config").splitlines()
    # Word by word: frames and the breaks of lines are the terminal library's.
    now, before = (re.sub(r"[─│╭╮╰╯\s]+", " ", text).split() for text in (golden_files.help_texts(),
                                                                          golden_files.kept("help")))
    assert now == before


# By how much other instruction sets round a metric otherwise: the part of it, and where it is a difference of numbers
# near 1 (a loss of log-ratios, a log-ratio) the absolute part. A decision or two may lie on a clip's other side.
RELATIVE = 2e-3
# grpo_guard clips at 2e-6, near what log-ratios are rounded to, and its loss is off by more.
ABSOLUTE = {"loss": 5e-5, "log_ratio_max": 2e-6, "clip_fraction": 0.04}


@pytest.fixture(scope="module")
def metrics():
    return json.loads(golden_files.kept("metrics"))


def test_every_preset_is_measured(metrics):
    assert {*metrics} == {f"{method} ({kind})" for kind, method in golden_files.RUNS}
    run = {name for _, method in golden_files.RUNS for name in method.split("+")}
    assert run | {*golden_files.ABOUT_IMAGES} == {*golden_files.presets.PRESETS}


def family(kind: str, method: str) -> tuple[str, type, type]:
    """Process, target and kind of surrogate of a run."""
    made = preset(*method.split("+"))
    surrogate = type(made.loss.surrogate)
    return kind, type(made.target), ClippedSurrogate if issubclass(surrogate, ClippedSurrogate) else surrogate.mro()[1]


# The fast tier runs one preset of each family.
FIRST = {family(*run): run for run in reversed(golden_files.RUNS)}
CASES = [pytest.param(*run, marks=[pytest.mark.fast] if run in FIRST.values() else []) for run in golden_files.RUNS]


@pytest.mark.parametrize("kind, method", CASES)
def test_two_epochs_measure_what_they_did_and_train_nothing_else(kind, method, metrics):
    trainer, allowed = golden_files.trainer(kind, method), dict(ABSOLUTE)
    if "grpo_guard" in method:
        allowed["loss"] = 2e-4
    before, frozen = trainer.policy.weights.snapshot(), tiny_runs.frozen(trainer)
    found = tiny_runs.epochs(trainer)
    for epoch, expected in zip(found, metrics[f"{method} ({kind})"], strict=True):
        own = golden_files.selected(method, epoch)
        assert {*own} == {*expected}
        for key, value in expected.items():
            assert own[key] == pytest.approx(value, rel=RELATIVE, abs=allowed.get(key, 1e-12)), key
    assert trainer.first_ratio.max_log_ratio <= 1e-5 and trainer.optimization.skipped == 0
    assert trainer.optimization.update == 2 * golden_files.PASSES and found[0]["grad_norm"] > 0
    assert all(torch.equal(frozen[key], value) for key, value in tiny_runs.frozen(trainer).items())
    assert any(not torch.equal(value, before[key]) for key, value in trainer.policy.weights.snapshot().items())
