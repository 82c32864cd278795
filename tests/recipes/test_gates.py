"""Gates: what is compared, how the tenths are dealt, and the tenth of the day."""

import math
import subprocess
import sys
from datetime import date
from pathlib import Path

import gates
import pytest

ROOT = Path(__file__).parents[2]
KEPT = gates.read()


def expected(**metrics):
    return {"machine": "this one", "epochs": [metrics]}


@pytest.mark.parametrize("kept, got, here, said", [
    (expected(loss=0.5), [{"loss": 0.5}], "this one", []),
    # Another last bit is a difference on the same machine, and none elsewhere.
    (expected(loss=0.5), [{"loss": math.nextafter(0.5, 1)}], "this one",
     ["epoch 1: loss: expected 0.5, got 0.5000000000000001, 0 apart allowed"]),
    (expected(loss=0.5), [{"loss": math.nextafter(0.5, 1)}], "another", []),
    # A loss near 0 is a difference of larger terms: half of 0.05.
    (expected(loss=0.001), [{"loss": 0.0259}], "another", []),
    (expected(loss=0.001), [{"loss": 0.0262}], "another",
     ["epoch 1: loss: expected 0.001, got 0.0262, 0.025 apart allowed"]),
    (expected(**{"reward/scene/mean": 0.4}), [{"reward/scene/mean": 0.47}], "another", []),
    (expected(**{"reward/scene/mean": 0.4}), [{"reward/scene/mean": 0.49}], "another",
     ["epoch 1: reward/scene/mean: expected 0.4, got 0.49, 0.08 apart allowed"]),
    (expected(lr=1e-3), [{"lr": 1.0001e-3}], "another",
     ["epoch 1: lr: expected 0.001, got 0.0010001, 0 apart allowed"]),
    (expected(evaluations=8), [{"evaluations": 9}], "another",
     ["epoch 1: evaluations: expected 8, got 9, 0 apart allowed"]),
    (expected(loss=0.5), [{"loss": math.nan}], "another", ["epoch 1: loss: expected 0.5, got nan, 0.25 apart allowed"]),
    (expected(loss=0.5, kl=0.1), [{"loss": 0.5}], "another",
     ["epoch 1: expected the metrics ['kl', 'loss'], got ['loss']"]),
    (expected(loss=0.5), [], "this one", ["expected 1 epochs, got 0"])])
def test_a_metric_differs_by_its_last_bit_here_and_by_its_tolerance_elsewhere(kept, got, here, said):
    assert gates.differences(kept, got, here) == said


def test_gates_are_of_recipes_have_three_epochs_and_learn():
    assert KEPT.keys() <= {*gates.names()}
    for name, kept in KEPT.items():
        assert len(kept["epochs"]) == gates.EPOCHS, name
        numbers = [value for epoch in kept["epochs"] for value in epoch.values()]
        assert all(map(math.isfinite, numbers)), name
        assert any(epoch["grad_norm"] > 0 for epoch in kept["epochs"]), name


def test_the_tenths_are_all_gates_once_and_take_about_as_long():
    tenths = [gates.tenth(KEPT, number) for number in range(10)]
    assert sorted(sum(tenths, [])) == sorted(KEPT)
    seconds = [sum(KEPT[name]["seconds"] for name in names) for names in tenths]
    assert max(seconds) < 2.5 * sum(seconds) / 10


def test_the_gate_of_the_day_passes():
    """One a day, of those that take less than a minute of a processor with bf16 units."""
    quick = [name for name in KEPT if KEPT[name]["seconds"] < 60]
    command = [sys.executable, "scripts/measure/gates.py", quick[date.today().toordinal() % len(quick)]]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
