"""Results of a bench, as results.json has them: every finished run, its method's means, and the tests between methods.

Only files that runs left are read.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

import numpy as np

from flowgrpo.bench import models
from flowgrpo.bench.methods import Entry
from flowgrpo.bench.plan import AS_PUBLISHED, PUBLISHED, TUNED, Plan, Run
from flowgrpo.bench.statistics import TEST, compare, interval, mean_curve, mean_path, reached, value_at
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import finite, read_lines, read_object

SHARES = (0.5, 0.75, 0.9)  # of the reference's gain
FEWEST = 1e-9  # a gain, or a base's diversity, that is none
MEND = "remove the run's folder, and the same command trains it again"


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
    return {label: _chosen(settings) for label, settings in accuracies.items()}


def _chosen(accuracies: dict[tuple[float, float], list[float]]) -> tuple[float, float]:
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
        "trained": models.shared(request.model)["reward"], "watched": list(of.watched), "reference": reference,
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
            "reached": [reached([(x, value) for x, value, *_ in curve], goal) for goal in goals.values()],
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
