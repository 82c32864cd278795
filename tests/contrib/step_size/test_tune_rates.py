"""Table of starting rates, and its counts, from runs whose ends are given."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "scripts" / "tune_rates.py"))


def ran(kind: str, rate: float, seed: int = 0, **came) -> dict:
    return {"setup": "text", "method": "grpo", "precision": "fp32", "kind": kind, "rate": rate, "seed": seed} | came


RUNS = [ran("fixed", 1e-5, before=0.5, after=0.51), ran("fixed", 1e-3, before=0.5, after=0.8),
        ran("fixed", 1e-3, 1, before=0.5, after=0.9), ran("fixed", 1.0, before=0.5, after=0.46),
        ran("auto", 1e-5, before=0.5, after=0.83, rate_found=8e-4), ran("auto", 1.0, before=0.5, after=0.81),
        ran("auto", 1e-3, error="train.lr is auto, but")]


def test_a_row_has_the_means_of_a_start_and_what_refused_runs_say(script):
    lines = script["table"](RUNS).splitlines()
    assert lines[2:5] == ["| text | grpo | fp32 | 1e-05 | 0.830 | 0.0008 | 0.510 | 0 |",
                          "| text | grpo | fp32 | 0.001 | train.lr is auto, but | - | 0.850 | 0, 1 |",
                          "| text | grpo | fp32 | 1 | 0.810 | - | 0.460 | 0 |"]


def test_collapsed_runs_and_those_near_the_best_fixed_rate_are_counted(script):
    """The best fixed rate is 1e-3, with (0.8 + 0.9) / 2."""
    assert script["counts"](RUNS) == [
        "- text, grpo, fp32, auto: 2 runs, 0 collapsed, 1 within 0.03 of the best fixed rate's 0.850",
        "- text, grpo, fp32, fixed: 4 runs, 1 collapsed, 1 within 0.03 of the best fixed rate's 0.850"]
