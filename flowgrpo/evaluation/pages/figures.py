"""Style of all figures: colours, fonts and grid lines of the report, on a light background."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowgrpo.storage import atomic

PAPER, INK, FAINT, LINE = "#ffffff", "#1f2328", "#5c636d", "#d9dce1"
COLOURS = ("#1d5fd1", "#c2570c", "#0f7f73", "#8b3fb5", "#9a7500", "#c0264f", "#4d7c0f", "#5b6472")  # as report.html
DASHES = ("-", "--", ":", "-.")
DPI = 140


@contextmanager
def styled() -> Iterator[Any]:
    """Context manager: yield pyplot, drawing into files, in this style."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(_style()):
        yield pyplot


def _style() -> Any:
    return {"axes.prop_cycle": f"cycler('color', {list(COLOURS)})", "font.family": "DejaVu Sans", "font.size": 10,
            "text.color": INK, "axes.labelcolor": FAINT, "axes.titlesize": 11, "axes.titleweight": "bold",
            "axes.titlelocation": "left", "axes.titlepad": 10,
            "axes.edgecolor": LINE, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
            "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": LINE, "grid.linewidth": 0.8,
            "xtick.color": LINE, "ytick.color": LINE, "xtick.labelcolor": FAINT, "ytick.labelcolor": FAINT,
            "ytick.major.size": 0, "lines.linewidth": 1.8, "lines.markersize": 5, "legend.frameon": False,
            "figure.facecolor": PAPER, "axes.facecolor": PAPER, "figure.constrained_layout.use": True}


def line_style(number: int) -> dict[str, Any]:
    """Return colour and dashes that distinguish the n-th line from the others."""
    return {"color": COLOURS[number % len(COLOURS)], "ls": DASHES[number // len(COLOURS) % len(DASHES)]}


def save(figure: Any, path: Path) -> None:
    """Write the figure as PNG, without a time stamp or version, and close it."""
    from matplotlib import pyplot

    with atomic.replacing(path) as file:
        figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    pyplot.close(figure)
