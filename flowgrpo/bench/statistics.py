"""Statistics of a bench: intervals and tests over prompts and seeds, and where a curve reaches an accuracy.

Scores of a method are an array [S, P]: of S seeds on the same P prompts. Methods are paired by prompt; their seeds are
independent of each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES, AT_ONCE = 10_000, 1000
FINENESS = 400  # resamples for each pair, so that the smallest p-value stays below 0.005 after Holm's correction
CONFIDENCE = 0.95
TEST = ("bootstrap over prompts and seeds, paired by prompt: prompts are drawn with replacement, the same for all "
        "methods, and seeds for each method apart; two-sided, with Holm's correction over all pairs of methods")


@dataclass(frozen=True)
class Difference:
    """Mean of one method less that of another, its 95 % interval, and the p-value before and after Holm's correction.

    order: 1 if the one is significantly above the other, -1 below, 0 neither.
    """

    one: str
    other: str
    mean: float
    low: float
    high: float
    p: float
    holm: float

    @property
    def order(self) -> int:
        return 0 if self.holm > 1 - CONFIDENCE else 1 if self.mean > 0 else -1


def spread_out(scores: np.ndarray) -> np.ndarray:
    """Return scores [S, P] with their seeds' distances from the mean seed times sqrt(S / (S - 1)).

    A bootstrap of few seeds is too narrow by that factor (rescaled bootstrap; Rao and Wu 1988). One seed stays.
    """
    seeds, mean = len(scores), scores.mean(0)
    return scores if seeds == 1 else mean + (scores - mean) * math.sqrt(seeds / (seeds - 1))


def resampled(scores: Mapping[str, np.ndarray], resamples: int = RESAMPLES, seed: int = 0) -> dict[str, np.ndarray]:
    """Return resampled means [resamples] of every method: prompts are drawn for all together, seeds for each."""
    prompts = {array.shape[1] for array in scores.values()}
    assert len(prompts) == 1, f"methods have scores on {prompts} prompts"
    [count], rng = prompts, np.random.default_rng(seed)
    spread = {name: spread_out(array) for name, array in scores.items()}
    means: dict[str, list[np.ndarray]] = {name: [] for name in scores}
    for size in _sizes(resamples):
        weights = _weights(rng, count, size)
        for name, array in spread.items():
            means[name].append((weights @ array.T * _weights(rng, len(array), size)).sum(1))
    return {name: np.concatenate(values) for name, values in means.items()}


def _weights(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
    """Return how often each of `count` things is drawn in `count` draws, as a share, [size, count]."""
    drawn = rng.integers(0, count, (size, count)) + count * np.arange(size)[:, None]
    return np.bincount(drawn.ravel(), minlength=size * count).reshape(size, count) / count


def _sizes(total: int) -> Iterator[int]:
    for start in range(0, total, AT_ONCE):
        yield min(AT_ONCE, total - start)


def enumerated(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the difference of means for every draw of prompts and seeds, which are equally likely. For tiny tables."""
    prompts, (one, other) = one.shape[1], map(spread_out, (one, other))
    draws = [[*itertools.product(range(size), repeat=size)] for size in (prompts, len(one), len(other))]
    return np.array([one[np.ix_(first, chosen)].mean() - other[np.ix_(second, chosen)].mean()
                     for chosen, first, second in itertools.product(*draws)])


def p_value(differences: np.ndarray) -> float:
    """Return the two-sided p-value of resampled differences: twice the smaller share beyond 0, at most 1.

    One more resample counts on either side, so that no p-value is 0.
    """
    beyond = min((differences <= 0).sum(), (differences >= 0).sum())
    return min(2 * (int(beyond) + 1) / (len(differences) + 1), 1.0)


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm 1979): the k-th smallest of m times m - k + 1, never below a
    smaller one's, at most 1."""
    corrected, highest = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(values[place] * (len(values) - rank), 1.0))
        corrected[place] = highest
    return corrected


def compare(scores: Mapping[str, np.ndarray]) -> list[Difference]:
    """Return the differences of all pairs of methods."""
    pairs, tail = [*itertools.combinations(scores, 2)], 50 * (1 - CONFIDENCE)
    means, values = resampled(scores, max(RESAMPLES, FINENESS * len(pairs))), []
    for one, other in pairs:
        moved = means[one] - means[other]
        low, high = np.percentile(moved, (tail, 100 - tail))
        values.append((float(scores[one].mean() - scores[other].mean()), float(low), float(high), p_value(moved)))
    corrected = holm([value[3] for value in values])
    return [Difference(*pair, *value, adjusted) for pair, value, adjusted in zip(pairs, values, corrected)]


def interval(scores: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of a method's mean, over prompts and seeds, within the range of its scores."""
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(resampled({"": scores})[""], (tail, 100 - tail)).clip(scores.min(), scores.max())
    return float(low), float(high)


def reached(points: Sequence[tuple[float, float]], goal: float) -> float | None:
    """Return where a curve of (x, y) first reaches a goal, on straight lines between its points; None: nowhere."""
    if points and points[0][1] >= goal:
        return points[0][0]
    for (before, low), (after, high) in itertools.pairwise(points):
        if low < goal <= high:
            return before + (after - before) * (goal - low) / (high - low)
    return None


def value_at(points: Sequence[Sequence[float]], place: float) -> float:
    """Return the y of a curve of (x, y, ...) at an x within it, on straight lines between its points."""
    return float(np.interp(place, [x for x, *_ in points], [y for _, y, *_ in points]))


def mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float, float, float]]:
    """Return (x, mean, lowest, highest) of several curves, at the x of all of their points where each has a value.

    Curves are straight between points.
    """
    end = min(curve[-1][0] for curve in curves)
    places = sorted({x for curve in curves for x, _ in curve if x <= end})
    values = np.array([np.interp(places, [x for x, _ in curve], [y for _, y in curve]) for curve in curves])
    return [(float(x), float(column.mean()), float(column.min()), float(column.max()))
            for x, column in zip(places, values.T)]


def mean_path(paths: Sequence[Sequence[tuple[int, float, float, float]]], of: int
              ) -> list[tuple[float, float, float, float]]:
    """Return (mean x, mean, lowest, highest) of several paths at the numbers that all have, in their order.

    A path has the columns number, x and further ones, of which `of` is shown. x may fall from one point to the next.
    """
    rows = [{point[0]: point for point in path} for path in paths]
    shared = sorted(set.intersection(*(set(row) for row in rows)))
    columns = [([row[number][1] for row in rows], [row[number][of] for row in rows]) for number in shared]
    return [(float(np.mean(x)), float(np.mean(y)), min(y), max(y)) for x, y in columns]
