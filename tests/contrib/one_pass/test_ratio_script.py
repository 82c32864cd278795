"""The script that measures what `train.one_pass` saves."""

import sys
from pathlib import Path

import pytest

from flowgrpo.config import load
from flowgrpo.contrib.one_pass import OnePass
from flowgrpo.training import extensions
from tests.helpers import loop, tiny_runs

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "measure"))

import one_pass_ratio  # noqa: E402


def test_a_line_has_the_median_and_every_repetition():
    assert one_pass_ratio.line("all_of_10", [1.4, 1.0, 1.25]) == "| all_of_10 | 1.25 | 1.40, 1.00, 1.25 |"


@pytest.mark.parametrize("case", one_pass_ratio.CASES)
def test_every_case_is_a_run_with_and_without_it(case):
    config = load(one_pass_ratio.RECIPE, one_pass_ratio.SMALL | one_pass_ratio.CASES[case] | {"train.one_pass": "true"})
    extensions.require(OnePass, loop.setup(config, "pipeline"))


def test_every_repetition_runs_an_epoch_of_each_kind():
    made = [tiny_runs.trainer("flow", tiny_runs.config("flow", "mix_grpo", train__updates=1, train__one_pass=one_pass))
            for one_pass in (False, True)]
    found = one_pass_ratio.ratios(*made, repetitions=2)
    assert len(found) == 2 and min(found) > 0 and [trainer.epoch for trainer in made] == [2, 2]
