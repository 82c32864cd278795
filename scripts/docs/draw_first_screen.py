"""Draw the first screen's figure from a finished demo run: images before and after, and the curve of its rewards.

    flowgrpo demo
    python scripts/docs/draw_first_screen.py runs/starter docs/images/before_after.png

Of the held-out prompts, the first of each task that the base got wrong is shown, whatever came after. Both images of a
prompt have one seed, and the run's sampler. The curve is the share of right images: of each epoch's samples, and
before and after of all held-out prompts. Prints the caption.
"""

import json
import sys
from pathlib import Path

import matplotlib
import numpy as np
import torch

from flowgrpo import rewards
from flowgrpo.config import parse
from flowgrpo.evaluation.measured import Measured, measure, spread
from flowgrpo.storage import checkpoint
from flowgrpo.tools.bench.probe import trainer_of
from flowgrpo.training import state

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

STRICT = "scene"
GREY, BLUE = "#8a8f98", "#1f6feb"


def measured(run: Path) -> tuple[Measured, Measured]:
    """Return the held-out measurements of the base and of the tuned model, with all images."""
    config = parse.load(run / "config.yaml")
    trainer, last = trainer_of(config), checkpoint.latest(run / "checkpoints")
    assert last is not None, f"{run} has no checkpoint"
    state.restore(trainer, last)
    policy, prompts = trainer.policy, spread(trainer.held_out, config.eval.prompts)
    functions = rewards.compose({STRICT: config.trained[STRICT]})

    def of(title: str) -> Measured:
        return measure(policy, prompts, functions, steps=config.eval.steps, guidance=config.eval.guidance, samples=1,
                       micro_batch=trainer.geometry.micro_batch, keep=len(prompts), title=title)

    with torch.no_grad(), policy.weights.swap(trainer.optimization.evaluated_weights()):
        tuned = of("tuned")
        with policy.reference():
            return of("base"), tuned


def chosen(base: Measured) -> list[int]:
    """Return the place of the first prompt of each task that the base got wrong."""
    places: dict[str, int] = {}
    for place, (prompt, score) in enumerate(zip(base.prompts, base.scores[STRICT])):
        if score < 1:
            places.setdefault(str(prompt.metadata["task"]), place)
    return [*places.values()]


def draw(run: Path, path: Path, base: Measured, tuned: Measured, places: list[int]) -> None:
    """Write three pairs a row, and the curve beside them."""
    rows = -(-len(places) // 3)
    figure = pyplot.figure(figsize=(12.4, 1.95 * rows + 0.25), dpi=100)
    grid = figure.add_gridspec(rows, 9, width_ratios=[1, 1, 0.08] * 2 + [1, 1, 1.75], left=0.005, right=0.955,
                               top=0.91, bottom=0.1, wspace=0.06, hspace=0.3)
    for number, place in enumerate(places):
        row, left = divmod(number, 3)
        for column, (side, colour) in enumerate(((base, GREY), (tuned, BLUE))):
            axes = figure.add_subplot(grid[row, 3 * left + column])
            axes.imshow(np.asarray(side.images[place].permute(1, 2, 0).clamp(0, 1)), interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            right = side.scores[STRICT][place] == 1
            axes.set_xlabel(("before" if side is base else "after") + (": right" if right else ": wrong"), fontsize=8,
                            color=colour, labelpad=2)
            for spine in axes.spines.values():
                spine.set_visible(False)
        axes.text(-0.03, 1.05, base.prompts[place].text, transform=axes.transAxes, ha="center", fontsize=8.5)
    curve(run, figure.add_subplot(grid[:, 8]), base, tuned)
    figure.savefig(path)


def curve(run: Path, axes: pyplot.Axes, base: Measured, tuned: Measured) -> None:
    """Draw the share of right images over the epochs."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    epochs = [line["epoch"] for line in lines]
    axes.plot(epochs, [line[f"reward/{STRICT}/mean"] for line in lines], color="#b9d3fb", lw=1.2, label="training")
    shares = [side.mean()[STRICT] for side in (base, tuned)]
    axes.plot([0, epochs[-1]], shares, "o", color=BLUE, label="held-out")
    for x, share, align in zip((0, epochs[-1]), shares, ("left", "right")):
        axes.annotate(f"{share:.3f}".removeprefix("0"), (x, share), xytext=(0, -13), textcoords="offset points",
                      ha=align, fontsize=9, color=BLUE)
    axes.set(ylim=(0, 1.04), xlabel="epoch", title="share of right images")
    axes.title.set_fontsize(9)
    axes.tick_params(labelsize=8)
    axes.yaxis.tick_right()
    axes.spines[["top", "left"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower center")


def main() -> None:
    run, path = Path(sys.argv[1]), Path(sys.argv[2])
    base, tuned = measured(run)
    places = chosen(base)
    draw(run, path, base, tuned, places)
    shares = [f"{side.mean()[STRICT]:.3f}".removeprefix("0") for side in (base, tuned)]
    print(f"Of the demo's {len(base.prompts)} held-out prompts, the first of each task that the base got wrong; same "
          f"seeds before and after. Over all {len(base.prompts)}, the share of right images rises from {shares[0]} to "
          f"{shares[1]}.")


if __name__ == "__main__":
    main()
