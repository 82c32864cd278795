"""Bounds of a run's own band, derived from the probability of a return without a cause.

A run makes three kinds of tests: of the training reward, of the held-out reward, and of spikes. Each kind gets a third
of that probability, and each of its tests an equal share (Bonferroni). The best of earlier measurements is selected,
so that every pair of two of them counts as a test. The only assumption is that means are nearly normal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

KINDS = 3
SIGNALS = ("grad_norm", "log_ratio_max", "kl")  # metrics of an update, which are read as logarithms
LEAST = 3  # values before a spike can be told


def of_pairs(false_alarms: float, count: int) -> float:
    """Return the level of one test, of all pairs of `count` measurements."""
    return false_alarms / KINDS / max(count * (count - 1) / 2, 1)


def of_spikes(false_alarms: float, epochs: int) -> float:
    """Return the level of one test of one signal in one epoch."""
    return false_alarms / KINDS / (epochs * len(SIGNALS))


def fell(best: Sequence[float], now: Sequence[float], level: float) -> bool:
    """Return True if the mean of independent values is below that of the best ones, by Welch's one-sided t-test."""
    if min(len(best), len(now)) < 2:
        return False
    (one, other), apart = (np.var(of, ddof=1) / len(of) for of in (best, now)), np.mean(best) - np.mean(now)
    if one + other == 0:
        return bool(apart > 0)
    freedom = (one + other)**2 / (one**2 / (len(best) - 1) + other**2 / (len(now) - 1))
    return bool(apart / math.sqrt(one + other) > stats.t.isf(level, freedom))


def fell_paired(best: Sequence[float], now: Sequence[float], level: float) -> bool:
    """Return True if values of the same prompts and seeds are below the best ones, by the paired t-test.

    Pairs with a NaN are left out.
    """
    apart = np.asarray(best, dtype=np.float64) - np.asarray(now, dtype=np.float64)
    apart = apart[~np.isnan(apart)]
    if len(apart) < 2:
        return False
    error = apart.std(ddof=1) / math.sqrt(len(apart))
    return bool(apart.mean() > 0 and apart.mean() > error * stats.t.isf(level, len(apart) - 1))


def limit(before: Sequence[float], level: float) -> float:
    """Return the largest value that the ones before allow: the upper bound of the prediction interval of their
    logarithms. It is infinite for fewer than LEAST values, and for equal ones, which have no spread."""
    logs = np.log(before)
    if len(logs) < LEAST or not (spread := logs.std(ddof=1)):
        return math.inf
    reach = stats.t.isf(level, len(logs) - 1) * spread * math.sqrt(1 + 1 / len(logs))
    return float(np.exp(min(logs.mean() + reach, 700.0)))
