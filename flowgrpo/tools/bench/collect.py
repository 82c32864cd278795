"""Results of a bench, as results.json has them: every finished run, its method's means, and the tests between methods:
intervals over prompts and seeds, and where a curve reaches an accuracy.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import numpy as np

from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import finite, read_lines, read_object
from flowgrpo.tools.bench import models
from flowgrpo.tools.bench.models import Entry
from flowgrpo.tools.bench.plan import AS_PUBLISHED, PUBLISHED, TUNED, Plan, Run

RESAMPLES, AT_ONCE = 10_000, 1000
FINENESS = 400  # resamples for each pair, so that the smallest p-value stays below 0.005 after Holm's correction
CONFIDENCE = 0.95
TEST = ("bootstrap over prompts and seeds, paired by prompt: prompts are drawn with replacement, the same for all "
        "methods, and seeds for each method apart; two-sided, with Holm's correction over all pairs of methods")
SHARES = (0.5, 0.75, 0.9)  # of the reference's gain
FEWEST = 1e-9  # a gain, or a base's diversity, that is none
MEND = "remove the run's folder, and the same command trains it again"


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


def bootstrap_means(scores: Mapping[str, np.ndarray], resamples: int = RESAMPLES, seed: int = 0
                    ) -> dict[str, np.ndarray]:
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


def enumerate_differences(one: np.ndarray, other: np.ndarray) -> np.ndarray:
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
    means, values = bootstrap_means(scores, max(RESAMPLES, FINENESS * len(pairs))), []
    for one, other in pairs:
        moved = means[one] - means[other]
        low, high = np.percentile(moved, (tail, 100 - tail))
        values.append((float(scores[one].mean() - scores[other].mean()), float(low), float(high), p_value(moved)))
    corrected = holm([value[3] for value in values])
    return [Difference(*pair, *value, adjusted) for pair, value, adjusted in zip(pairs, values, corrected)]


def interval(scores: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of a method's mean, over prompts and seeds, within the range of its scores."""
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(bootstrap_means({"": scores})[""], (tail, 100 - tail)).clip(scores.min(), scores.max())
    return float(low), float(high)


def first_crossing(points: Sequence[tuple[float, float]], goal: float) -> float | None:
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


def outcome(run: Run, measured: str, watched: Sequence[str]) -> dict[str, Any]:
    """Return what a finished run says of itself.

    curve: (evaluations, accuracy) from the base on; frontier: see `frontier`; scores: accuracy of every held-out
    prompt; seconds: of training; zero_variance: mean share of groups whose samples had the same accuracy, None if it
    was not trained on.
    """
    summary = read_object(run.folder / "summary.json", MEND)
    key, same = f"held_out/{measured}", f"reward/{measured}/zero_variance_groups"
    lines = read_lines(run.folder / "metrics.jsonl", "epoch", "evaluations")
    points = [(line["evaluations"], line[key]) for line in lines[:-1] if line.get(key) is not None]
    shares = [line[same] for line in lines if line.get(same) is not None]
    before = read_object(run.folder / "before.json", MEND)["scores"][measured]
    after = read_object(run.folder / "report" / "after.json", MEND)["scores"][measured]
    spent, probed = summary["denoiser_evaluations"], read_object(run.result, MEND) if run.result.is_file() else {}
    accuracies = {line["epoch"]: line[key] for line in lines if line.get(key) is not None} | {
        summary["epochs"]: summary["after"][measured]}
    return {"seed": run.seed, "folder": str(run.folder), "epochs": summary["epochs"], "evaluations": spent,
            "foretold": run.foretold, "seconds": summary["seconds"], "base": summary["before"][measured],
            "accuracy": summary["after"][measured],
            "curve": [(0, summary["before"][measured]), *points, (spent, summary["after"][measured])],
            "tasks": summary["tasks"][measured]["after"], "base_tasks": summary["tasks"][measured]["before"],
            "watched": {name: {"before": summary["before"][name], "after": summary["after"][name]}
                        for name in watched},
            "zero_variance": mean(shares) if shares else None,
            "base_scores": before, "scores": after, "unit": summary["unit"],
            "frontier": frontier(summary["before"][measured], accuracies, probed), **probed}


def frontier(base: float, accuracies: dict[int, float], probed: dict[str, Any]
             ) -> list[tuple[int, float, float, float]]:
    """Return (number, distance, accuracy, diversity) of the base and of every measurement that was probed.

    number: of the measurement, 0 of the base; seeds of a method may have measured at different epochs. distance: the
    square root of the KL to the base (Gao et al. 2022, 2210.10760), 0 where the estimate of a small KL is below 0.
    accuracies: by epoch. diversity: as a share of the base's. Measurements without a KL are left out.
    """
    numbers = {epoch: number for number, epoch in enumerate(sorted(accuracies), 1)}
    of_base = probed.get("diversity", {}).get("base", 0.0)
    return [(0, 0.0, base, 1.0)] + [
        (numbers[point["epoch"]], math.sqrt(max(point["kl"], 0.0)), accuracies[point["epoch"]],
         point["diversity"] / of_base if of_base > FEWEST else 1.0)
        for point in probed.get("points", []) if point["kl"] is not None and point["epoch"] in numbers]


def best_factors(runs: Sequence[Run], measured: str) -> dict[str, tuple[float, float]]:
    """Return the factors (lr, clip) that the finished runs of a sweep choose, by label.

    The winner has the highest validation accuracy of the sweep's first seed; among equals the first of the sweep's
    order, which begins with 1. The published setting (1, 1) stays if the winner's mean over all its seeds is not above
    the published accuracy.
    """
    accuracies: dict[str, dict[tuple[float, float], list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in sorted((run for run in runs if run.result.is_file()), key=lambda run: run.seed):
        accuracy = read_object(run.folder / "summary.json", MEND)["after"][measured]
        accuracies[run.entry.label][run.lr, run.clip].append(accuracy)
    return {label: _best_factors(settings) for label, settings in accuracies.items()}


def _best_factors(accuracies: dict[tuple[float, float], list[float]]) -> tuple[float, float]:
    winner, published = max(accuracies, key=lambda factors: accuracies[factors][0]), accuracies.get(AS_PUBLISHED)
    return winner if published is None or mean(accuracies[winner]) > published[0] else AS_PUBLISHED


def results(plan: Plan, runs: Sequence[Run], errors: dict[str, str]) -> dict[str, Any]:
    """Return the results of all finished runs; errors: of failed ones, by label."""
    request, of = plan.request, plan.of
    finished: dict[str, dict[str, list[dict[str, Any]]]] = {PUBLISHED: defaultdict(list), TUNED: defaultdict(list)}
    factors: dict[str, tuple[float, float]] = {}
    for run in runs:
        if run.column in finished and run.result.is_file():
            finished[run.column][run.entry.label].append(outcome(run, of.measured, list(of.watched)))
            if run.column == TUNED:
                factors[run.entry.label] = run.lr, run.clip
    present = [entry for entry in plan.entries if entry.label in finished[PUBLISHED]]
    reference = next((entry.label for entry in present if entry is plan.reference), None)
    some = [run for made in finished[PUBLISHED].values() for run in made]
    base = mean(run["base"] for run in some) if some else None
    final = mean(run["accuracy"] for run in finished[PUBLISHED][reference]) if reference else None
    goals = {share: base + share * (final - base) for share in SHARES} \
        if base is not None and final is not None and final - base > FEWEST else {}
    methods = [_method(entry, finished[PUBLISHED][entry.label], goals) for entry in present]
    cost = min((float(method["curve"][-1][0]) for method in methods), default=0.0)
    for method in methods:
        method["at_cost"] = value_at(method["curve"], cost)
        if tuned := finished[TUNED].get(method["label"]):
            lr, clip = factors[method["label"]]
            method["tuned"] = _accuracy(tuned) | {"lr": lr, "clip": clip, "runs": tuned}
        method["seconds_ratio"] = _ratio(method["seconds"], [other["seconds"] for other in methods
                                                             if other["label"] == reference])
    return finite({
        "model": request.model, "unit": some[0]["unit"] if some else None, "evaluations": request.evaluations,
        "cost": cost, "apart": [list(row) for row in models.differences(request.model)],
        "seeds": request.seeds, "points": request.points, "prompts": {side: len(prompts) for side, prompts in
                                                                      plan.sides.items()},
        "measured_prompts": len(some[0]["scores"]) if some else 0, "measured": of.measured,
        "trained": models.common_settings(request.model)["reward"], "watched": list(of.watched), "reference": reference,
        "base": base,
        "base_tasks": some[0]["base_tasks"] if some else {}, "goals": [[share, goal] for share, goal in goals.items()],
        "methods": methods, "test": TEST, "differences": _differences(finished[PUBLISHED], present),
        "tuned_differences": _differences(finished[TUNED], present), "errors": errors})


def _accuracy(runs: list[dict[str, Any]]) -> dict[str, Any]:
    values = [run["accuracy"] for run in runs]
    low, high = interval(_scores(runs))
    return {"accuracy": mean(values), "lowest": min(values), "highest": max(values), "low": low, "high": high}


def _scores(runs: list[dict[str, Any]]) -> np.ndarray:
    """Return the accuracy of every seed and prompt, [S, P]; 0 where the reward does not apply."""
    return np.nan_to_num(np.array([run["scores"] for run in runs], dtype=np.float64))


def _method(entry: Entry, runs: list[dict[str, Any]], goals: dict[float, float]) -> dict[str, Any]:
    curve = mean_curve([run["curve"] for run in runs])
    kls, same = ([run[key] for run in runs if run.get(key) is not None] for key in ("kl", "zero_variance"))
    frontiers = [run["frontier"] for run in runs]
    return {"label": entry.label, "given": entry.given, "adjusted": entry.adjusted, "runs": runs, **_accuracy(runs),
            "frontier": mean_path(frontiers, 2), "diversities": mean_path(frontiers, 3),
            "gain": mean(run["accuracy"] - run["base"] for run in runs), "curve": curve,
            "reached": [first_crossing([(x, value) for x, value, *_ in curve], goal) for goal in goals.values()],
            "tasks": {task: mean(run["tasks"][task] for run in runs) for task in runs[0]["tasks"]},
            "kl": mean(kls) if kls else None, "zero_variance": mean(same) if same else None,
            "diversity": _ratio(mean(run["diversity"]["tuned"] for run in runs),
                                [mean(run["diversity"]["base"] for run in runs)]),
            "watched": {name: {side: mean(run["watched"][name][side] for run in runs) for side in ("before", "after")}
                        for name in runs[0]["watched"]},
            **{key: mean(run[key] for run in runs) for key in ("epochs", "evaluations", "seconds")}}


def _ratio(value: float, of: list[float]) -> float | None:
    return value / of[0] if of and of[0] > FEWEST else None


def _differences(runs: dict[str, list[dict[str, Any]]], present: list[Entry]) -> list[dict[str, Any]]:
    """Return the tests of all pairs of methods."""
    scores = {entry.label: _scores(runs[entry.label]) for entry in present if runs.get(entry.label)}
    pairs = compare(scores) if len(scores) > 1 else []
    return [asdict(pair) | {"order": pair.order} for pair in pairs]


def write(plan: Plan, runs: Sequence[Run], errors: dict[str, str]) -> dict[str, Any]:
    """Write results.json to the bench's folder; return its content."""
    told = results(plan, runs, errors)
    atomic.write_text(plan.request.output / "results.json", json.dumps(told, indent=1) + "\n")
    return told
