"""Draw the figures of docs/learning_rate.md from the runs and readings that docs/ holds.

    python scripts/docs/draw_rates.py            # docs/data/rates.json, docs/data/step_readings.json; seconds
"""

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from flowgrpo.evaluation.pages.figures import COLOURS, FAINT, LINE, figure_style, save

DOCS = Path(__file__).parents[2] / "docs"
AUTO, FIXED = COLOURS[0], COLOURS[1]
COLUMNS = 3


def panels(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the whole runs by set-up, in the order in which they first come."""
    found = defaultdict(list)
    for run in runs:
        if "error" not in run:
            found[f"{run['setup']}, {run['precision']}\n{run['method']}"].append(run)
    return found


def grid(pyplot, count: int, height: float = 2.4):
    """Return a figure and its first `count` axes; others are hidden."""
    rows = -(-count // COLUMNS)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(9.5, height * rows), squeeze=False)
    for axis in axes.flat[count:]:
        axis.axis("off")
    return figure, axes.flat[:count]


def draw_ends(pyplot, runs: list[dict[str, Any]]) -> None:
    """Draw held-out rewards behind runs over their starting rates: dots of runs, lines through the means of seeds."""
    shown = panels(runs)
    figure, axes = grid(pyplot, len(shown))
    for axis, (title, group) in zip(axes, shown.items()):
        axis.axhline(mean(run["before"] for run in group), color=FAINT, lw=1, ls=":")
        for kind, colour in (("fixed", FIXED), ("auto", AUTO)):
            by_rate = defaultdict(list)
            for run in group:
                if run["kind"] == kind:
                    by_rate[run["rate"]].append(run["after"])
            rates = sorted(by_rate)
            axis.plot(rates, [mean(by_rate[rate]) for rate in rates], color=colour, label=kind)
            axis.plot([rate for rate in rates for _ in by_rate[rate]], [end for rate in rates for end in by_rate[rate]],
                      "o", color=colour, ms=3, alpha=0.5)
        axis.set(title=title, xscale="log", ylim=(-0.03, 1))
        axis.title.set_fontsize(8)
    axes[0].legend(loc="lower left")
    axes[0].set_ylabel("held-out reward")
    figure.supxlabel("starting rate (auto), or the rate itself (fixed, warm-up of 8 updates)", fontsize=10, color=FAINT)
    save(figure, DOCS / "images" / "learning_rate_ends.png")


def draw_found(pyplot, runs: list[dict[str, Any]]) -> None:
    """Draw the rates of auto runs of seed 0 as their calibration goes on, one line per starting rate."""
    shown = {title: [run for run in group if run["kind"] == "auto" and run["seed"] == 0]
             for title, group in panels(runs).items() if "bf16" in title}
    figure, axes = grid(pyplot, len(shown))
    for axis, (title, group) in zip(axes, shown.items()):
        for run in sorted(group, key=lambda run: run["rate"]):
            rates = [run["rate"], *(line["rate"] for line in run["calibration"])]
            axis.plot(range(len(rates)), rates, color=AUTO, alpha=0.5)
        axis.set(title=title, yscale="log", ylim=(5e-6, 0.5))
        axis.title.set_fontsize(8)
    axes[0].set_ylabel("learning rate")
    figure.supxlabel("measured epochs (of language models four updates each)", fontsize=10, color=FAINT)
    save(figure, DOCS / "images" / "learning_rate_found.png")


def draw_readings(pyplot, readings: list[dict[str, Any]]) -> None:
    """Draw signals over the multiples of a step that is read: fp32 is a straight line, bf16 has a floor."""
    starters = list(dict.fromkeys(row["starter"] for row in readings))
    figure, axes = grid(pyplot, len(starters), 2.8)
    for axis, starter in zip(axes, starters):
        axis.axvline(2 if starter == "text" else 8, color=LINE, lw=6)
        for row in readings:
            if row["starter"] == starter and row["update"] == 1:
                axis.plot(row["factors"], row["signals"], "o-", ms=3, label=row["precision"],
                          color=FIXED if row["precision"] == "bf16" else AUTO)
        axis.set(title=starter, xscale="log", yscale="log")
    axes[0].legend(loc="upper left")
    axes[0].set_ylabel("change of what is sampled")
    figure.supxlabel("multiple of the optimizer step; the grey line is where `auto` reads", fontsize=10, color=FAINT)
    save(figure, DOCS / "images" / "learning_rate_readings.png")


def main() -> None:
    runs = json.loads((DOCS / "data" / "rates.json").read_text())
    readings = json.loads((DOCS / "data" / "step_readings.json").read_text())
    with figure_style() as pyplot:
        draw_ends(pyplot, runs)
        draw_found(pyplot, runs)
        draw_readings(pyplot, readings)


if __name__ == "__main__":
    main()
