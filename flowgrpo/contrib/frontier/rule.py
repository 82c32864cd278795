"""Rule by which a run keeps the weights before reward hacking.

A trained reward rises with the distance to the base. A reward that is not trained on rises at first and falls from some
distance on, while the trained one still rises (Gao et al. 2022, 2210.10760, figure 1). Training moves away from the
base, so that the order of measurements stands for the distance. The first measurement is kept. A later one replaces it
if two tests over the same held-out prompts and seeds agree:

- The trained reward is above that of the kept weights. A step further from the base has to buy a gain that can be
  shown; among equals the nearest is kept (the one-standard-error rule; Breiman et al. 1984, section 3.4.3).
- No eval-only reward is below its best measurement so far, the base's included.

Both are paired one-sided t-tests at 5 %, the complement of `statistics.CONFIDENCE`, shared by the eval-only rewards
(Bonferroni). A best value stays what later ones are compared with, so that a slow fall adds up. The level is not shared
by the measurements too. A best of many lies above its own mean, so that some measurements without a fall are passed
over; a later one is kept then. A fall that is not seen costs more: hacked weights. On simulated curves of Gao et al.
the looser level keeps weights nearer to the peak, and on flat ones it costs 1 % of the trained reward (`test_rule`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from flowgrpo.contrib.guard.bounds import fell_paired
from flowgrpo.evaluation.statistics import CONFIDENCE

LEVEL = 1 - CONFIDENCE
Scores = dict[str, list[float]]  # mean of each held-out prompt by reward, NaN where it does not apply


@dataclass
class Frontier:
    """Measurements of a run, as far as the rule reads them.

    weights: of the trained rewards, by name; all other rewards are eval-only.
    base: scores of the base. best: highest scores so far of each eval-only reward. kept: scores of the kept weights,
    empty before there are any. value: their trained reward.
    """

    weights: Mapping[str, float]
    base: Scores = field(default_factory=dict)
    best: Scores = field(default_factory=dict)
    kept: Scores = field(default_factory=dict)
    value: float = 0.0

    def begin(self, base: Scores) -> None:
        """Start anew from the scores of the base."""
        self.base, self.kept, self.value = base, {}, 0.0
        self.best = {name: values for name, values in base.items() if name not in self.weights}

    def see(self, now: Scores) -> tuple[bool, list[str]]:
        """Record a measurement; return True if its weights are to be kept, and the eval-only rewards that it lost
        although its trained reward is above that of the kept weights."""
        fallen = self._fallen(now)
        for name, best in self.best.items():
            if mean(now[name]) > mean(best) or np.isnan(best).all():
                self.best[name] = now[name]
        if not self.kept:
            gain, gained = trained(self.weights, now), True
        else:
            moved = change(self.weights, self.kept, now)
            gain, gained = mean(moved), fell_paired(moved.tolist(), [0.0] * len(moved), LEVEL)
        keeps = not np.isnan(gain) and (not self.kept or (gained and not fallen))
        if keeps:
            self.kept, self.value = now, self.value + gain
        return keeps, fallen if gained else []

    def _fallen(self, now: Scores) -> list[str]:
        """Return the eval-only rewards below their best by more than chance."""
        return [name for name, best in self.best.items() if fell_paired(best, now[name], LEVEL / len(self.best))]


def change(weights: Mapping[str, float], before: Scores, now: Scores) -> np.ndarray:
    """Return the change of the weighted sum of trained rewards of each prompt [N].

    A reward that applies to a prompt in neither measurement changes nothing; NaN where it applies in one of them alone,
    and where none applies.
    """
    pairs = np.array([[before[name], now[name]] for name in weights], dtype=np.float64)  # [R, 2, N]
    absent = np.isnan(pairs).all(1)
    moved = np.where(absent, 0, pairs[:, 1] - pairs[:, 0])
    return np.where(absent.all(0), np.nan, np.array([*weights.values()]) @ moved)


def trained(weights: Mapping[str, float], now: Scores) -> float:
    """Return the mean of the weighted sum of trained rewards; NaN where none applies."""
    return mean(change(weights, {name: [0.0 if value == value else value for value in now[name]] for name in weights},
                       now))


def mean(values: Iterable[float]) -> float:
    """Return the mean of the values that are not NaN; NaN without any."""
    known = [value for value in values if value == value]
    return float(np.mean(known)) if known else float("nan")
