"""Statistics and table of the study of parts: pure functions of the scores of finished runs."""

from collections.abc import Collection, Mapping, Sequence
from statistics import mean
from typing import Any

import numpy as np
from scipy import stats

from flowgrpo.evaluation.statistics import holm
from flowgrpo.tools.bench.collect import CONFIDENCE, estimate

# Quantities of a run, and whether a higher value is better.
HIGHER = {"accuracy": True, "pass@8": True, "entropy": True, "kl": False, "diversity": True}
DIGITS = {"accuracy": 3, "pass@8": 3, "entropy": 2, "kl": 2, "diversity": 3}
KEYS = ("name", "setting", "pool")  # fields that no two rows share
VERDICTS = {1: "helps", 0: "not shown", -1: "hurts"}


def compared(without: np.ndarray, having: np.ndarray) -> dict[str, Any]:
    """Return the comparison of scores [S, P] of both arms: means of seeds, difference, interval and p-values.

    p: of the bench's `estimate`, over prompts and seeds. welch: of Welch's t-test on the means of seeds, which is
    stricter with few seeds.
    """
    found = estimate(having, without)
    sides = having.mean(1), without.mean(1)
    constant = all(np.ptp(side) == 0 for side in sides)
    welch = float(sides[0].mean() == sides[1].mean()) if constant else stats.ttest_ind(*sides, equal_var=False).pvalue
    return {"without": sides[1].tolist(), "with": sides[0].tolist(), "difference": found.mean, "low": found.low,
            "high": found.high, "p": found.p, "welch": float(welch)}


def judged(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return results with the number of seeds that are better, p-values after Holm's correction over all rows, and the
    verdict on each: 1, 0 or -1."""
    corrected = holm([result["p"] for result in results])
    return [result | {"better": better(result), "holm": p, "verdict": verdict(result)}
            for result, p in zip(results, corrected)]


def merged(known: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return known rows with new ones in the place of the same or at the end, judged together."""
    rows = {tuple(row[key] for key in KEYS): row for row in (*known, *new)}
    return judged([*rows.values()])


def better(result: Mapping[str, Any]) -> int:
    """Return the number of seeds whose run with the part is better than that without."""
    sign = 1 if HIGHER[result["quantity"]] else -1
    return sum(sign * (after - before) > 0 for before, after in zip(result["without"], result["with"]))


def verdict(result: Mapping[str, Any]) -> int:
    """Return 1 if the difference is significant and every seed is better, -1 if none is, else 0."""
    if result["p"] > 1 - CONFIDENCE:
        return 0
    return {len(result["with"]): 1, 0: -1}.get(better(result), 0)


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the Markdown table."""
    lines = ["| part | prompts | quantity | without | with | difference, 95 % | seeds | p | Holm | Welch | verdict | "
             "cost |", "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---|---:|"]
    for result in results:
        digits = DIGITS[result["quantity"]]
        sides = [spread(result[side], digits) for side in ("without", "with")]
        moved = f"{result['difference']:+.{digits}f} ({result['low']:+.{digits}f} to {result['high']:+.{digits}f})"
        arrow = "higher" if HIGHER[result["quantity"]] else "lower"
        cells = [named(result), result["pool"], f"{result['quantity']}, {arrow}", *sides, moved,
                 f"{result['better']}/{len(result['with'])}",
                 *(probability(result[key]) for key in ("p", "holm", "welch")), VERDICTS[result["verdict"]],
                 f"x{result['evaluations']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def accuracies(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table of accuracies of the rows that another quantity judges; none without such rows."""
    others = [result for result in results if result["quantity"] != "accuracy"]
    rows = [f"| {named(other)} | {other['pool']} | {other['accuracy'][0]:.3f} | {other['accuracy'][1]:.3f} |"
            for other in others]
    return ["| part | prompts | without | with |", "|---|---|---:|---:|", *rows] if rows else []


def tried(results: Sequence[Mapping[str, Any]], chosen: Collection[tuple[str, str, str]]) -> list[str]:
    """Return the lines of a table of settings that were tried, with the quantity and the accuracy of both arms.

    chosen: name, setting and pool of the rows that were measured on held-out prompts.
    """
    lines = ["| part | prompts | quantity | without | with | accuracy without | with | held-out row |",
             "|---|---|---|---:|---:|---:|---:|---|"]
    for result in results:
        digits, key = DIGITS[result["quantity"]], (result["name"], result["setting"], result["pool"])
        cells = [named(result), result["pool"], result["quantity"],
                 *(f"{mean(result[side]):.{digits}f}" for side in ("without", "with")),
                 *(f"{value:.3f}" for value in result["accuracy"]), "yes" if key in chosen else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def named(result: Mapping[str, Any]) -> str:
    """Return the part of a row with its setting in brackets."""
    return f"`{result['name']}`" + (f" ({result['setting']})" if result["setting"] else "")


def spread(seeds: Sequence[float], digits: int) -> str:
    """Return the mean of seeds with the lowest and the highest in brackets."""
    return f"{mean(seeds):.{digits}f} ({min(seeds):.{digits}f} to {max(seeds):.{digits}f})"


def probability(p: float) -> str:
    """Return a p-value with three decimals, the smallest as a bound."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
