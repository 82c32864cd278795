"""Figures: the style of all (colours, fonts and grid lines of the report, on a light background), and the plot of
rewards over the RLG weight.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from flowgrpo.evaluation.statistics import ALL
from flowgrpo.storage import atomic

Results: TypeAlias = Mapping[str, Mapping[str, Mapping[str, Any]]]

PAPER, INK, FAINT, LINE = "#ffffff", "#1f2328", "#5c636d", "#d9dce1"
COLOURS = ("#1d5fd1", "#c2570c", "#0f7f73", "#8b3fb5", "#9a7500", "#c0264f", "#4d7c0f", "#5b6472")  # as report.html
DASHES = ("-", "--", ":", "-.")
DPI = 140
PANELS = 3
STYLE: Any = {
    "axes.prop_cycle": f"cycler('color', {list(COLOURS)})", "font.family": "DejaVu Sans", "font.size": 10,
    "text.color": INK, "axes.labelcolor": FAINT, "axes.titlesize": 11, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.titlepad": 10,
    "axes.edgecolor": LINE, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": LINE, "grid.linewidth": 0.8,
    "xtick.color": LINE, "ytick.color": LINE, "xtick.labelcolor": FAINT, "ytick.labelcolor": FAINT,
    "ytick.major.size": 0, "lines.linewidth": 1.8, "lines.markersize": 5, "legend.frameon": False,
    "figure.facecolor": PAPER, "axes.facecolor": PAPER, "figure.constrained_layout.use": True}


@contextmanager
def figure_style() -> Iterator[Any]:
    """Context manager: yield pyplot, drawing into files, in this style."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        yield pyplot


def save(figure: Any, path: Path) -> None:
    """Write the figure as PNG or PDF, by the path's ending, without a time stamp or version, and close it."""
    from matplotlib import pyplot

    kind = path.suffix[1:]
    unsaid = {"png": ["Software"], "pdf": ["Creator", "Producer", "CreationDate"]}[kind]
    with atomic.replacing(path) as file:
        figure.savefig(file, format=kind, dpi=DPI, metadata=dict.fromkeys(unsaid))
    pyplot.close(figure)


def plot(arms: Mapping[str, float], results: Results, path: Path) -> None:
    """Write a PNG with a panel per reward; dashed lines mark the base, 0, and the tuned model, 1.

    arms: the weight of each arm. results: of an evaluation, by arm, reward and category.
    """
    rewards = [*next(iter(results.values()))]
    across = min(len(rewards), PANELS)
    down = -(-len(rewards) // across)
    with figure_style() as pyplot:
        figure, panels = pyplot.subplots(down, across, figsize=(4.2 * across, 3.4 * down), squeeze=False)
        for panel in list(panels.flat)[len(rewards):]:
            panel.remove()
        for panel, reward in zip(panels.flat, rewards):
            draw(panel, reward, arms, results)
        save(figure, path)


def draw(panel: Any, reward: str, arms: Mapping[str, float], results: Results) -> None:
    """Draw one reward's mean over all prompts with its 95 % interval, with ticks at the weights."""
    weights, found = [*arms.values()], [results[arm][reward][ALL] for arm in arms]
    means, lows, highs = ([entry[key] for entry in found] for key in ("mean", "low", "high"))
    for weight in (0, 1):
        panel.axvline(weight, color=FAINT, lw=0.9, ls="--", zorder=1)
    panel.fill_between(weights, lows, highs, alpha=0.16, lw=0)
    panel.plot(weights, means, "o-")
    panel.set_xticks(weights, [f"{weight:g}" for weight in weights])
    panel.set(xlabel="RLG weight (0 base, 1 tuned)", ylabel="mean, 95 % interval", title=reward.rpartition("/")[2])
