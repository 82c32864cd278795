"""Confidence intervals of means, win rates, and signs of drift.

Scores are arrays [N, S] of N prompts with S pictures each, NaN where a reward does not apply. The pictures of a prompt
are not independent, so bootstraps resample prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000
LEAST = 20  # prompts; with fewer, a bootstrap's interval is too narrow to report drift
WILSON, BOOTSTRAP = "Wilson", "bootstrap over prompts"


@dataclass(frozen=True)
class Interval:
    """Mean over `prompts` prompts with its 95 % interval and the interval's method; NaN with too few prompts."""

    mean: float
    low: float
    high: float
    method: str
    prompts: int

    def told(self) -> dict[str, Any]:
        return asdict(self)


def interval(scores: np.ndarray, share: bool = True) -> Interval:
    """Return the mean of the prompts' means of scores [N, S], with its interval.

    If these means are all 0 or 1: Wilson's interval (1927) for a share of prompts. Otherwise the percentiles of a
    bootstrap over prompts (Efron 1979), with a fixed seed; one prompt, or equal ones, give no spread.
    share: False for differences, whose 0 and 1 are not a share.
    """
    from scipy import stats

    scores = np.asarray(scores, dtype=np.float64)
    there = ~np.isnan(scores)
    scores, there = scores[there.any(1)], there[there.any(1)]
    values = np.where(there, scores, 0).sum(1) / there.sum(1)
    if share and len(values) and np.isin(values, (0, 1)).all():
        bounds = stats.binomtest(int(values.sum()), len(values)).proportion_ci(CONFIDENCE, "wilson")
        return Interval(float(values.mean()), float(bounds.low), float(bounds.high), WILSON, len(values))
    mean = float(values.mean()) if len(values) else math.nan
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan, BOOTSTRAP, len(values))
    bounds = stats.bootstrap((values,), np.mean, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, batch=100,
                             method="percentile", random_state=np.random.default_rng(0)).confidence_interval
    return Interval(mean, float(bounds.low), float(bounds.high), BOOTSTRAP, len(values))


def wins(base: np.ndarray, tuned: np.ndarray) -> np.ndarray:
    """Return 1 where the tuned picture beats the base's of the same prompt and seed, 1/2 on a tie, 0 where it loses;
    NaN where one has no score. [N, S] -> [N, S]."""
    return np.where(np.isnan(base) | np.isnan(tuned), np.nan, (tuned > base) + 0.5 * (tuned == base))


def drift(changes: dict[str, Interval], trained: Iterable[str] | None, diversity: Interval | None = None,
          unit: str = "pictures") -> list[str]:
    """Describe the effects of tuning, one sentence each. A change counts if its interval excludes 0.

    changes: tuned minus base, by reward. trained: the trained rewards, None if unknown. diversity: change of the
    distance between a prompt's samples. unit: name of the samples.
    A reward with scores on fewer than LEAST prompts is left out.
    """
    few = [f"nothing is said of drift in {name}: it has scores on {change.prompts} prompts, and at least {LEAST} are "
           "needed" for name, change in changes.items() if change.prompts < LEAST]
    changes = {name: change for name, change in changes.items() if change.prompts >= LEAST}
    if not changes:
        return few
    rose, fell = ([name for name, change in changes.items() if holds(change)]
                  for holds in (lambda change: change.low > 0, lambda change: change.high < 0))
    said = few + _said(changes, None if trained is None else set(trained), rose, fell)
    if diversity is not None and diversity.high < 0:
        said.append(f"the {unit} of a prompt became more alike: {_amount('diversity', diversity)}")
    return said


def _said(changes: dict[str, Interval], trained: set[str] | None, rose: list[str], fell: list[str]) -> list[str]:
    amounts = {name: _amount(name, change) for name, change in changes.items()}
    if trained is None:
        what = ", ".join(amounts[name] for name in rose + fell) or "no reward changed by more than chance"
        return [f"{what} (which reward was trained on is not known, so that nothing is said of hacking)"]
    up, down = ([name for name in side if (name in trained) == mine] for side, mine in ((rose, True), (fell, False)))
    watched = [name for name in changes if name not in trained]
    if up and down:
        return [f"possible reward hacking: {_listed(amounts, up)}, which was trained on, while "
                f"{_listed(amounts, down)}, held out"]
    if not watched:
        return ["no held-out reward was measured, so that hacking could not be seen: add one to --rewards"]
    if not up:
        return ["no trained reward rose by more than chance" + (f"; {_listed(amounts, down)}" if down else "")]
    return [f"{_listed(amounts, up)}; no held-out reward ({', '.join(watched)}) fell by more than chance"]


def _listed(amounts: dict[str, str], names: list[str]) -> str:
    return " and ".join(amounts[name] for name in names)


def _amount(name: str, change: Interval) -> str:
    way = "rose" if change.mean > 0 else "fell"
    return f"{name} {way} by {abs(change.mean):.3f} (95 %: {change.low:+.3f} to {change.high:+.3f})"
