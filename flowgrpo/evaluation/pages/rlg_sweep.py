"""Plot of rewards over the RLG weight."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo.evaluation.pages import figures
from flowgrpo.evaluation.statistics import ALL

PANELS = 3


class Curve(NamedTuple):
    """Mean of a reward over all prompts at each weight, and the bounds of its 95 % interval."""

    weights: list[float]
    means: list[float]
    lows: list[float]
    highs: list[float]


def curves(arms: Mapping[str, float], results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Curve]:
    """Return a curve per reward. arms: the weight of each arm. results: of an evaluation, by arm, reward and
    category."""
    def curve(reward: str) -> Curve:
        entries = [results[arm][reward][ALL] for arm in arms]
        return Curve(list(arms.values()), *([entry[key] for entry in entries] for key in ("mean", "low", "high")))

    return {reward: curve(reward) for reward in next(iter(results.values()))}


def plot(curves: Mapping[str, Curve], path: Path) -> None:
    """Write a PNG with a panel per reward, at most PANELS side by side; dashed lines mark the base, 0, and the tuned
    model, 1."""
    across = min(len(curves), PANELS)
    down = -(-len(curves) // across)
    with figures.styled() as pyplot:
        figure, panels = pyplot.subplots(down, across, figsize=(4.2 * across, 3.4 * down), squeeze=False)
        for panel in list(panels.flat)[len(curves):]:
            panel.remove()
        for panel, (reward, curve) in zip(panels.flat, curves.items()):
            draw(panel, reward, curve)
        figures.save(figure, path)


def draw(panel: Any, reward: str, curve: Curve) -> None:
    """Draw one reward's curve, with ticks at its weights."""
    for weight in (0, 1):
        panel.axvline(weight, color=figures.FAINT, lw=0.9, ls="--", zorder=1)
    panel.fill_between(curve.weights, curve.lows, curve.highs, alpha=0.16, lw=0)
    panel.plot(curve.weights, curve.means, "o-")
    panel.set_xticks(curve.weights, [f"{weight:g}" for weight in curve.weights])
    panel.set(xlabel="RLG weight (0 base, 1 tuned)", ylabel="mean, 95 % interval", title=reward.rpartition("/")[2])
