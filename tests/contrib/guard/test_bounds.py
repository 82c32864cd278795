"""Bounds of the guard: against scipy's tests, by hand, and by the share of runs that would go back without a cause."""

import math

import numpy as np
import pytest
from scipy import stats

from flowgrpo.contrib import guard


def test_levels_share_the_probability_among_all_tests_of_a_run():
    pairs = 20 * 19 / 2
    assert guard.of_pairs(0.01, 20) * pairs == pytest.approx(0.01 / 3)
    assert guard.of_spikes(0.01, 20) * 20 * 3 == pytest.approx(0.01 / 3)
    assert guard.of_pairs(0.01, 1) == pytest.approx(0.01 / 3)


@pytest.mark.parametrize("seed", range(4))
def test_a_fall_is_that_of_welch(seed):
    rng = np.random.default_rng(seed)
    best, now = rng.normal(1, 1, 12), rng.normal(0.3, 2, 7)
    found = stats.ttest_ind(best, now, equal_var=False, alternative="greater").pvalue
    assert not guard.fell(best, now, found * 0.99) and guard.fell(best, now, found * 1.01)
    assert not guard.fell(now, best, 0.4)


@pytest.mark.parametrize("seed", range(4))
def test_a_fall_of_pairs_is_that_of_their_differences(seed):
    rng = np.random.default_rng(seed)
    best = rng.normal(1, 1, 12)
    now = best - rng.normal(0.5, 0.5, 12)
    found = stats.ttest_rel(best, now, alternative="greater").pvalue
    assert not guard.fell_paired(best, now, found * 0.99) and guard.fell_paired(best, now, found * 1.01)
    assert guard.fell_paired([*best, math.nan], [*now, 0.0], found * 1.01)


def test_values_without_a_spread_decide_by_themselves():
    assert guard.fell([1, 1], [0, 0], 1e-9) and not guard.fell([0, 0], [1, 1], 0.4)
    assert guard.fell_paired([1, 1], [0, 0], 1e-9) and not guard.fell_paired([1, 1], [1, 1], 0.4)
    assert not guard.fell([1], [0, 0], 0.4) and not guard.fell_paired([1], [0], 0.4)


def test_the_limit_of_a_spike_by_hand():
    """Logarithms 0, 1, 2: mean 1, deviation 1; the bound is exp(1 + t sqrt(4/3)) with t of 2 degrees of freedom."""
    expected = math.exp(1 + stats.t.isf(0.1, 2) * math.sqrt(4 / 3))
    assert guard.limit(np.exp([0, 1, 2]), 0.1) == pytest.approx(expected)
    assert guard.limit([1, 2], 0.1) == guard.limit([1, 1, 1], 0.1) == math.inf


def test_runs_without_a_fall_go_back_no_more_often_than_said():
    """400 runs of 12 epochs x 8 groups with one mean, each window of two epochs against the best before it."""
    rng, level, alarms = np.random.default_rng(0), guard.of_pairs(0.3, 12), 0
    for _ in range(400):
        rewards = rng.random((12, 8))
        alarms += any(guard.fell(rewards[i:i + 2].ravel(), rewards[j:j + 2].ravel(), level)
                      for i in range(11) for j in range(i + 2, 11))
    assert alarms / 400 < 0.1  # a third of .3


def test_updates_without_a_spike_go_back_no_more_often_than_said():
    rng, level = np.random.default_rng(0), guard.of_spikes(0.3, 12)
    runs = rng.lognormal(0, 0.5, (400, 12))
    alarms = sum(any(run[k] > guard.limit(run[max(0, k - 4):k], level) for k in range(12)) for run in runs)
    assert alarms / 400 < 0.1 / 3 + 3 * math.sqrt(0.033 / 400)
