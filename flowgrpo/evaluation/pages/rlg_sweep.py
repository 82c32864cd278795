"""Plot of rewards over the RLG weight."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo.evaluation.findings import ALL


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
    """Write a PNG with a panel per reward; dashed lines mark the base, 0, and the tuned model, 1."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(curves), figsize=(4.5 * len(curves), 3.5), layout="constrained",
                                     squeeze=False)
    for panel, (reward, curve) in zip(panels[0], curves.items()):
        panel.fill_between(curve.weights, curve.lows, curve.highs, alpha=0.2, lw=0)
        panel.plot(curve.weights, curve.means, "o-")
        for weight in (0, 1):
            panel.axvline(weight, color="black", lw=0.8, ls="--", alpha=0.5)
        panel.set(xlabel="weight of RLG (0 base, 1 tuned)", ylabel="mean, 95 % interval",
                  title=reward.rpartition("/")[2])
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
