"""Results of a bench, as results.json has them: every finished run, its method's mean and difference to the reference
with intervals over seeds and prompts, and where a curve reaches an accuracy.
"""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import numpy as np
from scipy import stats

from flowgrpo.evaluation.report.snapshots import FOLDER, PACKAGES
from flowgrpo.evaluation.statistics import holm
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import finite, read_lines, read_object
from flowgrpo.tools.bench import models
from flowgrpo.tools.bench.models import Entry
from flowgrpo.tools.bench.plan import AS_PUBLISHED, PUBLISHED, TUNED, Plan, Run

CONFIDENCE = 0.95
TEST = ("95 %, seeds and prompts as crossed random factors, t with Satterthwaite's degrees of freedom, two-sided, with "
        "Holm's correction over the comparisons with the reference")
SHARES = (0.5, 0.75, 0.9)  # of the reference's gain
FEWEST = 1e-9  # a gain, or a base's diversity, that is none
MEND = "remove the run's folder, and the same command trains it again"


@dataclass(frozen=True)
class Estimate:
    """Mean or difference, its 95 % interval, and its p against 0; NaN where a single seed says nothing."""

    mean: float
    low: float
    high: float
    p: float


def estimate(one: np.ndarray, other: np.ndarray | None = None) -> Estimate:
    """Mean of scores [S, P], or its difference to that of other ones [T, P], with an interval.

    A trained model, so a seed, is the unit of replication; all of them answer the same prompts. So seeds and prompts
    are crossed random factors, and the variance of the mean is (MS_seeds + MS_prompts - MS_rest) / (S P) (Cornfield and
    Tukey 1956), at least that of either factor alone. Two methods share the prompts, whose differences count, and no
    seed. The quantile is Student's, with the degrees of freedom of Satterthwaite (1946): two seeds have wide intervals,
    as a bootstrap of two has not.
    """
    sides, shown = [one] if other is None else [one, other], one.mean(0) - (0.0 if other is None else other.mean(0))
    mean = float(shown.mean())
    if min(map(len, sides)) < 2 or len(shown) < 2:
        return Estimate(mean, math.nan, math.nan, math.nan)
    parts = [(float(side.mean(1).var(ddof=1)) / len(side), len(side) - 1) for side in sides]
    of_seeds, of_prompts = sum(variance for variance, _ in parts), float(shown.var(ddof=1)) / len(shown)
    unexplained = 0.0  # MS_rest / (S P) of each side: what neither seed nor prompt explains
    for side in sides:
        rest = side - side.mean(0) - side.mean(1, keepdims=True) + side.mean()
        unexplained += float((rest**2).sum()) / math.prod(count - 1 for count in side.shape) / side.size
    variance = max(of_seeds + of_prompts - unexplained, of_seeds, of_prompts)
    if not variance:
        return Estimate(mean, mean, mean, float(not mean))
    freedom = variance**2 / sum(part**2 / count for part, count in (*parts, (of_prompts, len(shown) - 1)))
    t, error = stats.t(max(freedom, 1.0)), math.sqrt(variance)
    half = float(t.ppf((1 + CONFIDENCE) / 2)) * error
    return Estimate(mean, mean - half, mean + half, float(2 * t.sf(abs(mean) / error)))


def compare(scores: Mapping[str, np.ndarray], reference: str) -> dict[str, dict[str, float]]:
    """Difference of each other method to the reference: an `Estimate` and `holm`, its p after Holm's correction."""
    found = {name: estimate(values, scores[reference]) for name, values in scores.items() if name != reference}
    known = [name for name, each in found.items() if not math.isnan(each.p)]
    adjusted = dict(zip(known, holm([found[name].p for name in known])))
    return {name: asdict(each) | {"holm": adjusted.get(name, math.nan)} for name, each in found.items()}


def first_crossing(points: Sequence[tuple[float, float]], goal: float) -> float | None:
    """First x at which a curve of (x, y) reaches a goal, on straight lines between its points; None for none."""
    if points and points[0][1] >= goal:
        return points[0][0]
    for (before, low), (after, high) in itertools.pairwise(points):
        if low < goal <= high:
            return before + (after - before) * (goal - low) / (high - low)
    return None


def value_at(points: Sequence[Sequence[float]], place: float) -> float:
    """Y of a curve of (x, y, ...) at an x within it, on straight lines between its points."""
    return float(np.interp(place, [x for x, *_ in points], [y for _, y, *_ in points]))


def mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float, float, float]]:
    """(x, mean, lowest, highest) of curves of straight lines, at all their points where each has a value."""
    end = min(curve[-1][0] for curve in curves)
    places = sorted({x for curve in curves for x, _ in curve if x <= end})
    values = np.array([np.interp(places, [x for x, _ in curve], [y for _, y in curve]) for curve in curves])
    return [(float(x), float(column.mean()), float(column.min()), float(column.max()))
            for x, column in zip(places, values.T)]


def mean_path(paths: Sequence[Sequence[tuple[int, float, float, float]]], of: int
              ) -> list[tuple[float, float, float, float]]:
    """(mean x, mean, lowest, highest) of several paths at the numbers that all have, in their order. A path has the
    columns number, x and further ones, of which `of` is shown. x may fall from one point to the next."""
    rows = [{point[0]: point for point in path} for path in paths]
    shared = sorted(set.intersection(*(set(row) for row in rows)))
    columns = [([row[number][1] for row in rows], [row[number][of] for row in rows]) for number in shared]
    return [(float(np.mean(x)), float(np.mean(y)), min(y), max(y)) for x, y in columns]


def outcome(run: Run, measured: str, watched: Sequence[str]) -> dict[str, Any]:
    """Results of a finished run, from its files.

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
            "machine": read_object(run.folder / FOLDER / "machine.json", MEND),
            "frontier": frontier(summary["before"][measured], accuracies, probed), **probed}


def frontier(base: float, accuracies: dict[int, float], probed: dict[str, Any]
             ) -> list[tuple[int, float, float, float]]:
    """(number, distance, accuracy, diversity) of the base and of every measurement that was probed.

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
    """Factors (lr, clip) that the finished runs of a sweep choose, by label.

    The winner has the highest validation accuracy of the sweep's first seed; among equals the first of the sweep's
    order, which begins with 1. The published setting (1, 1) stays if the winner's mean over all its seeds is not above
    the published accuracy.
    """
    accuracies: dict[str, dict[tuple[float, float], list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in sorted((run for run in runs if run.result.is_file()), key=lambda run: run.seed):
        accuracy = read_object(run.folder / "summary.json", MEND)["after"][measured]
        accuracies[run.entry.label][run.lr, run.clip].append(accuracy)
    best = {}
    for label, settings in accuracies.items():
        winner, published = max(settings, key=lambda factors: settings[factors][0]), settings.get(AS_PUBLISHED)
        moved = published is None or mean(settings[winner]) > published[0]
        best[label] = winner if moved else AS_PUBLISHED
    return best


def write(plan: Plan, runs: Sequence[Run], errors: dict[str, str]) -> dict[str, Any]:
    """Write results.json of all finished runs to the bench's folder; return its content. errors: of failed ones, by
    label."""
    request, of = plan.request, plan.of
    finished: dict[str, dict[str, list[dict[str, Any]]]] = {PUBLISHED: defaultdict(list), TUNED: defaultdict(list)}
    factors: dict[str, dict[str, float]] = {}
    for run in runs:
        if run.column in finished and run.result.is_file():
            finished[run.column][run.entry.label].append(outcome(run, of.measured, list(of.watched)))
            if run.column == TUNED:
                factors[run.entry.label] = {"lr": run.lr, "clip": run.clip}
    published, tuned = finished[PUBLISHED], finished[TUNED]
    reference = plan.reference.label if plan.reference.label in published else None
    some = [run for made in published.values() for run in made]
    base = mean(run["base"] for run in some) if some else None
    # Accuracies that are shares of the reference's gain over the base: a curve's cost is where it reaches them.
    gain = mean(run["accuracy"] for run in published[reference]) - base if reference and base is not None else 0.0
    goals = [[share, base + share * gain] for share in SHARES] if base is not None and gain > FEWEST else []
    methods = [_method(entry, published[entry.label], [goal for _, goal in goals])
               for entry in plan.entries if entry.label in published]
    moved, best = (compare({label: _scores(each) for label, each in made.items()}, reference)
                   if reference in made else {} for made in (published, tuned))
    # Where methods spent differently, they are compared at the cost that all reached.
    cost = min((float(method["curve"][-1][0]) for method in methods), default=0.0)
    seconds = next((method["seconds"] for method in methods if method["label"] == reference), 0.0)
    for method in methods:
        label = method["label"]
        method["at_cost"], method["difference"] = value_at(method["curve"], cost), moved.get(label)
        if label in tuned:
            method["tuned"] = _accuracy(tuned[label]) | factors[label] | {
                "runs": tuned[label], "difference": best.get(label)}
        method["seconds_ratio"] = _ratio(method["seconds"], seconds)
    first = some[0] if some else {"unit": None, "scores": [], "base_tasks": {}}
    told = finite({
        "model": request.model, "unit": first["unit"], "evaluations": request.evaluations,
        "budget": "at most" + ", as two measured epochs predict" * bool(plan.unforeseen),
        "cost": cost, "apart": [list(row) for row in models.differences(request.model)],
        "seeds": request.seeds, "points": request.points,
        "prompts": {side: len(prompts) for side, prompts in plan.sides.items()},
        "measured_prompts": len(first["scores"]), "measured": of.measured,
        "trained": models.common_settings(request.model)["reward"], "watched": list(of.watched), "reference": reference,
        "base": base, "base_tasks": first["base_tasks"], "goals": goals, "methods": methods, "test": TEST,
        "errors": errors})
    atomic.write_text(request.output / "results.json", json.dumps(told, indent=1) + "\n")
    return told


def _accuracy(runs: list[dict[str, Any]]) -> dict[str, Any]:
    values, scores = [run["accuracy"] for run in runs], _scores(runs)
    found = estimate(scores)
    low, high = np.clip((found.low, found.high), scores.min(), scores.max()).tolist()  # NaN stays
    return {"accuracy": mean(values), "lowest": min(values), "highest": max(values), "low": low, "high": high}


def _scores(runs: list[dict[str, Any]]) -> np.ndarray:
    """Accuracy of every seed and prompt, [S, P]; 0 where the reward does not apply."""
    return np.nan_to_num(np.array([run["scores"] for run in runs], dtype=np.float64))


def _method(entry: Entry, runs: list[dict[str, Any]], goals: Sequence[float]) -> dict[str, Any]:
    curve = mean_curve([run["curve"] for run in runs])
    kls, same = ([run[key] for run in runs if run.get(key) is not None] for key in ("kl", "zero_variance"))
    frontiers = [run["frontier"] for run in runs]
    return {"label": entry.label, "given": entry.given, "adjusted": entry.adjusted, "runs": runs, **_accuracy(runs),
            "seeds": len(runs), "software": software([run["machine"] for run in runs]),
            "frontier": mean_path(frontiers, 2), "diversities": mean_path(frontiers, 3),
            "gain": mean(run["accuracy"] - run["base"] for run in runs), "curve": curve,
            "reached": [first_crossing([(x, value) for x, value, *_ in curve], goal) for goal in goals],
            "tasks": {task: mean(run["tasks"][task] for run in runs) for task in runs[0]["tasks"]},
            "kl": mean(kls) if kls else None, "zero_variance": mean(same) if same else None,
            "diversity": _ratio(*(mean(run["diversity"][side] for run in runs) for side in ("tuned", "base"))),
            "watched": {name: {side: mean(run["watched"][name][side] for run in runs) for side in ("before", "after")}
                        for name in runs[0]["watched"]},
            **{key: mean(run[key] for run in runs) for key in ("epochs", "evaluations", "seconds")}}


def software(machines: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Versions of packages, and the commit where runs were of a clone; those of different runs one after the other."""
    return {key: " and ".join(dict.fromkeys(machine.get(key, "no clone") for machine in machines))
            for key in (*PACKAGES, "commit") if any(key in machine for machine in machines)}


def _ratio(value: float, of: float) -> float | None:
    return value / of if of > FEWEST else None
