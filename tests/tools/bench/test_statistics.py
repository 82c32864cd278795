"""Statistics of a bench against closed forms and enumerated tables."""

import numpy as np
import pytest

from flowgrpo.tools.bench import collect
from flowgrpo.tools.bench.collect import Difference, compare, holm, interval, mean_curve, p_value, reached, resampled

ONE, OTHER = np.array([[1.0, 0.25], [0.5, 0.0]]), np.array([[0.0, 0.25], [0.25, 0.5]])


def test_resamples_have_the_distribution_of_all_draws():
    """2 prompts and 2 seeds: 4 draws of prompts, 4 of either method's seeds, 64 in all, equally likely."""
    every, drawn = collect.enumerated(ONE, OTHER), resampled({"a": ONE, "b": OTHER}, 200_000)
    differences = drawn["a"] - drawn["b"]
    assert len(every) == 64 and every.mean() == pytest.approx(ONE.mean() - OTHER.mean())
    assert differences.mean() == pytest.approx(every.mean(), abs=0.005)
    assert differences.std() == pytest.approx(every.std(), rel=0.01)
    for value, count in zip(*np.unique(every.round(9), return_counts=True)):
        assert np.isclose(differences, value).mean() == pytest.approx(count / 64, abs=0.006)


def test_prompts_are_paired_and_seeds_are_not():
    """A constant lead on every prompt has no spread over prompts; that over seeds is s^2 / S of each method."""
    hard = np.random.default_rng(0).normal(size=50)
    same = np.tile(hard, (3, 1))
    moved = resampled({"a": same + 0.1, "b": same})
    assert np.ptp(moved["a"] - moved["b"]) == pytest.approx(0, abs=1e-12) and np.std(moved["a"]) > 0.05
    seeds = np.array([[0.0], [1.0], [2.0]])  # s^2 = 1, S = 3
    assert resampled({"a": np.tile(seeds, (1, 4))}, 100_000)["a"].var() == pytest.approx(1 / 3, rel=0.02)


def test_one_seed_has_the_spread_of_its_prompts():
    drawn = resampled({"a": np.array([[0.0, 1.0, 1.0, 0.0]])}, 100_000)["a"]
    assert drawn.mean() == pytest.approx(0.5, abs=0.005) and drawn.var() == pytest.approx(0.25 / 4, rel=0.02)
    assert interval(np.ones((1, 5))) == (1.0, 1.0)
    assert interval(np.array([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]]))[1] == 1.0  # and not above


def test_p_values_count_the_smaller_side():
    assert p_value(np.array([1.0, 2.0, 3.0])) == 2 / 4  # none at or below 0: one resample more on either side
    assert p_value(np.array([-1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])) == 4 / 8
    assert p_value(np.zeros(9)) == 1.0


def test_holm_by_hand():
    # sorted: 0.01 * 4, 0.02 * 3, 0.03 * 2 below the one before, 0.6
    assert holm([0.03, 0.01, 0.6, 0.02]) == pytest.approx([0.06, 0.04, 0.6, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_an_order_is_significant_or_none():
    rng = np.random.default_rng(0)
    hard = rng.random(200)
    low, high = ((hard < share).astype(float)[None].repeat(3, 0) for share in (0.4, 0.6))
    pairs = {(pair.one, pair.other): pair for pair in compare({"low": low, "high": high, "again": low})}
    assert [pairs[pair].order for pair in (("low", "high"), ("low", "again"), ("high", "again"))] == [-1, 0, 1]
    first = pairs["low", "high"]
    assert first.mean == pytest.approx(low.mean() - high.mean()) and first.low < first.mean < first.high < 0
    assert first.holm == pytest.approx(3 * first.p) and pairs["low", "again"].p == 1.0
    assert Difference("a", "b", 0.1, 0.0, 0.2, 0.02, 0.051).order == 0


def test_a_goal_is_reached_on_straight_lines():
    curve = [(0, 0.4), (60, 0.6), (100, 0.5)]
    assert reached(curve, 0.5) == pytest.approx(30) and reached(curve, 0.6) == pytest.approx(60)
    assert reached(curve, 0.4) == 0 and reached(curve, 0.61) is None


def test_a_mean_curve_by_hand():
    curves = [[(0, 0.0), (10, 1.0), (20, 1.0)], [(0, 0.0), (20, 0.5)]]
    assert mean_curve(curves) == [(0, 0, 0, 0), (10, pytest.approx(0.625), 0.25, 1.0), (20, 0.75, 0.5, 1.0)]
