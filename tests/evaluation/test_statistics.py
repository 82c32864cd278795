"""Intervals, win rates and what is said of drift, on numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flowgrpo.evaluation.statistics import BOOTSTRAP, WILSON, Interval, drift, interval, wins

NAN = math.nan


@pytest.mark.parametrize("hits, count", [(0, 10), (3, 10), (10, 10), (41, 200)])
def test_a_share_has_wilsons_interval(hits, count):
    z, p = 1.959963984540054, hits / count
    middle, half = (p + z * z / (2 * count)), z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    found = interval(np.array([1.0] * hits + [0.0] * (count - hits))[:, None])
    assert (found.mean, found.method, found.prompts) == (pytest.approx(p, abs=1e-12), WILSON, count)
    assert found.low == pytest.approx(max((middle - half) / (1 + z * z / count), 0), abs=1e-10)
    assert found.high == pytest.approx(min((middle + half) / (1 + z * z / count), 1), abs=1e-10)


def test_other_scores_have_a_bootstraps_interval():
    scores = np.random.default_rng(1).normal(2.0, 0.5, (400, 1))
    found, half = interval(scores), 1.96 * scores.std() / 20
    assert found.method == BOOTSTRAP and found.mean == pytest.approx(scores.mean(), abs=1e-12)
    assert found.low == pytest.approx(found.mean - half, abs=0.1 * half)
    assert found.high == pytest.approx(found.mean + half, abs=0.1 * half)
    assert found == interval(scores)


def test_pictures_of_a_prompt_do_not_count_as_independent():
    values = np.random.default_rng(2).normal(size=(50, 1))
    one, eight = interval(values), interval(np.repeat(values, 8, 1))
    assert (eight.low, eight.high) == (pytest.approx(one.low, abs=1e-10), pytest.approx(one.high, abs=1e-10))


def test_what_does_not_apply_is_left_out():
    found = interval(np.array([[1.0, NAN], [NAN, NAN], [0.0, 3.0]]))
    assert (found.mean, found.prompts) == (1.25, 2)
    alone = interval(np.array([[NAN], [2.5]]))
    assert (alone.mean, alone.prompts) == (2.5, 1) and math.isnan(alone.low) and math.isnan(alone.high)
    none = interval(np.array([[NAN]]))
    assert none.prompts == 0 and math.isnan(none.mean)


def test_a_share_is_one_of_prompts_whose_pictures_all_agree():
    assert interval(np.array([[1.0, 0.0], [1.0, 1.0]])).method == BOOTSTRAP
    agreed = interval(np.array([[1.0, 1.0], [1.0, NAN], [0.0, 0.0]]))
    assert agreed == interval(np.array([[1.0], [1.0], [0.0]])) and agreed.method == WILSON


def test_differences_are_no_share():
    """One gain among ten prompts: Wilson's interval would leave out 0, and call it a rise."""
    gains = np.array([1.0] + [0.0] * 9)[:, None]
    assert interval(gains).low > 0
    assert interval(gains, share=False).method == BOOTSTRAP and interval(gains, share=False).low == 0


def test_wins_are_paired_and_ties_are_halves():
    base, tuned = np.array([[1, 2, NAN], [5, 5, 1.0]]), np.array([[2, 1, 3], [5, NAN, 0.0]])
    np.testing.assert_array_equal(wins(base, tuned), [[1, 0, NAN], [0.5, NAN, 0]])


def change(mean: float, half: float = 0.01) -> Interval:
    return Interval(mean, mean - half, mean + half, BOOTSTRAP, 100)


UP, DOWN, SAME = change(0.2), change(-0.1), change(0.001)


@pytest.mark.parametrize("changes, trained, expected", [
    ({"a": UP, "b": DOWN}, ["a"], ["possible reward hacking: a rose by 0.200 (95 %: +0.190 to +0.210), which was "
                                   "trained on, while b fell by 0.100 (95 %: -0.110 to -0.090), held out"]),
    ({"a": UP, "b": SAME}, ["a"], ["a rose by 0.200 (95 %: +0.190 to +0.210); no held-out reward (b) fell by more than "
                                   "chance"]),
    ({"a": UP, "b": UP}, ["a"], ["a rose by 0.200 (95 %: +0.190 to +0.210); no held-out reward (b) fell by more than "
                                 "chance"]),
    ({"a": SAME, "b": DOWN}, ["a"], ["no trained reward rose by more than chance; b fell by 0.100 (95 %: -0.110 to "
                                     "-0.090)"]),
    ({"a": DOWN, "b": SAME}, ["a"], ["no trained reward rose by more than chance"]),
    ({"a": UP}, ["a"], ["no held-out reward was measured, so that hacking could not be seen: add one to --rewards"]),
    ({"a": UP, "b": DOWN}, None, ["a rose by 0.200 (95 %: +0.190 to +0.210), b fell by 0.100 (95 %: -0.110 to -0.090) "
                                  "(which reward was trained on is not known, so that nothing is said of hacking)"]),
])
def test_drift_is_said_in_words(changes, trained, expected):
    assert drift(changes, trained) == expected


def test_nothing_is_said_on_a_few_prompts():
    few = Interval(0.2, 0.1, 0.3, BOOTSTRAP, 19)
    said = "nothing is said of drift in {}: it has scores on 19 prompts, and at least 20 are needed"
    assert drift({"b": few}, ["a"], DOWN) == [said.format("b")]
    assert drift({"a": UP, "b": few}, ["a"]) == [
        said.format("b"), "no held-out reward was measured, so that hacking could not be seen: add one to --rewards"]


def test_pictures_that_became_alike_are_told():
    assert drift({"a": UP, "b": SAME}, ["a"], DOWN)[1] == (
        "the pictures of a prompt became more alike: diversity fell by 0.100 (95 %: -0.110 to -0.090)")
    assert len(drift({"a": UP, "b": SAME}, ["a"], UP)) == 1
