"""Draw the figures of docs/concepts/index.md from the package's own kernels and plans.

    python scripts/docs/draw_concepts.py            # some seconds on a CPU
"""

from pathlib import Path

import torch
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from flowgrpo.evaluation.pages.figures import COLOURS, FAINT, INK, LINE, figure_style, save
from flowgrpo.samplers import kernels, plans
from flowgrpo.samplers.kernels import euler

FOLDER = Path(__file__).parents[2] / "docs" / "concepts"
MEANS, SPREAD = torch.tensor([-1.0, 1.0]), 0.15  # of the toy data: two narrow Gaussians
STEPS, PATHS = 24, 7


def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Return the exact velocity E[noise - data | x] [B] of x = (1 - sigma) data + sigma noise, of the toy data."""
    variance = ((1 - sigma) * SPREAD) ** 2 + sigma**2
    weights = torch.softmax(-((x[:, None] - (1 - sigma) * MEANS) ** 2) / (2 * variance), 1)
    data = MEANS + (1 - sigma) * SPREAD**2 * (x[:, None] - (1 - sigma) * MEANS) / variance
    data = (weights * data).sum(1)
    return (x - data) / sigma


def paths(kernel, start: torch.Tensor, window: range, seed: int = 0) -> torch.Tensor:
    """Return the states [STEPS+1, B] of rollouts whose steps in `window` draw noise by the kernel."""
    torch.manual_seed(seed)
    grid, x = torch.linspace(1, 0, STEPS + 1), start
    states = [x]
    for i in range(STEPS):
        v = velocity(x, grid[i].clamp(min=1e-4))
        if i in window and i < STEPS - 1:
            step = kernel(x[:, None], v[:, None], grid, i)
            x = step.mean[:, 0] + step.std * torch.randn_like(x)
        else:
            x = euler(x[:, None], v[:, None], grid, i)[:, 0]
        states.append(x)
    return torch.stack(states)


def draw_steps(pyplot) -> None:
    """Draw ODE, SDE and mixed rollouts from shared initial noise."""
    figure, axes = pyplot.subplots(1, 3, figsize=(9.5, 3.0), sharey=True)
    grid, start = torch.linspace(1, 0, STEPS + 1), torch.full((PATHS,), 0.35)
    spread = torch.linspace(-1.4, 1.4, PATHS)
    kinds = (("ODE: the noise decides", range(0), spread), ("SDE: every step draws noise", range(STEPS), start),
             ("SDE window, ODE around it", range(4, 9), start))
    for axis, (title, window, first) in zip(axes, kinds):
        states = paths(kernels.FlowSDE(0.7), first, window)
        if window and len(window) < STEPS:
            axis.axvspan(grid[window[-1] + 1], grid[window[0]], color=COLOURS[0], alpha=0.08, lw=0)
        for k in range(PATHS):
            axis.plot(grid, states[:, k], color=COLOURS[k % len(COLOURS)], lw=1.3)
        axis.set(title=title, xlim=(1, 0), xlabel="sigma: noise (1) to data (0)")
    axes[0].set_ylabel("state x")
    save(figure, FOLDER / "steps.png")


def draw_plans(pyplot) -> None:
    """Draw which steps of 12 draw noise and are trained, epoch by epoch."""
    steps, epochs = 12, 16
    shown = (("AllSteps", plans.AllSteps()), ("RandomSubset", plans.RandomSubset(0.6)),
             ("Sliding, progressive", plans.Sliding(size=4, every=2)),
             ("Sliding, random", plans.Sliding(size=2, order="random", stop=0.5)))
    figure, axes = pyplot.subplots(1, len(shown), figsize=(9.5, 2.9), sharey=True)
    for axis, (title, plan) in zip(axes, shown):
        axis.grid(False)
        for epoch in range(epochs):
            schedule = plan(steps, epoch, 0)
            for step in range(steps):
                colour = COLOURS[0] if step in schedule.trained else "#a9c4f2" if step in schedule.stochastic else LINE
                axis.add_patch(pyplot.Rectangle((step - 0.45, epoch - 0.42), 0.9, 0.84, color=colour, lw=0))
        axis.set(title=title, xlim=(-0.7, steps - 0.3), ylim=(epochs - 0.3, -0.7), xlabel="step of the rollout",
                 xticks=range(0, steps, 2), yticks=range(0, epochs, 5))
    axes[0].set_ylabel("epoch")
    save(figure, FOLDER / "windows.png")


def draw_trees(pyplot) -> None:
    """Draw the rollouts of a group as a tree: chains, branches of BranchGRPO, a tree in a window."""
    shown = (("independent samples", [8, 1, 1, 1, 1, 1]), ("Branches: splits 0, 2, 4", [2, 1, 2, 1, 2, 1]),
             ("TreeWindow of 3 steps", [1, 1, 2, 2, 2, 1]))
    figure, axes = pyplot.subplots(1, 3, figsize=(9.5, 2.8), sharey=True)
    for axis, (title, children) in zip(axes, shown):
        axis.grid(False)
        places = [0.5]
        for step, count in enumerate(children):
            wide = len(places) * count
            after = [(k + 0.5) / wide for k in range(wide)]
            for k, place in enumerate(after):
                axis.plot([step, step + 1], [places[k // count], place], color=COLOURS[0] if count > 1 else FAINT,
                          lw=1.4)
            places = after
        axis.plot([len(children)] * len(places), places, "o", color=COLOURS[1], ms=4)
        axis.set(title=title, xlabel="step of the rollout", yticks=[])
    save(figure, FOLDER / "trees.png")


def box(axis, x: float, y: float, width: float, text: str, colour: str) -> None:
    """Draw a labelled box with its lower left corner at (x, y)."""
    axis.add_patch(FancyBboxPatch((x, y), width, 0.62, boxstyle="round,pad=0.02,rounding_size=0.08", fc=colour + "22",
                                  ec=colour, lw=1.2))
    axis.text(x + width / 2, y + 0.31, text, ha="center", va="center", fontsize=8.5, color=INK)


def arrow(axis, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
    axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=FAINT, lw=1.1))
    axis.text((start[0] + end[0]) / 2 + 0.04, (start[1] + end[1]) / 2 + 0.05, text, fontsize=7.5, color=FAINT)


def draw_slot(pyplot) -> None:
    """Draw the pipeline's loop with the policy scheduler in it, in the rollout and in the replay."""
    figure, axes = pyplot.subplots(2, 1, figsize=(9.5, 4.2))
    rows = (("Rollout, without gradients", "draw x' ~ N(mean, std)\nrecord x, x', log p_old"),
            ("Replay of one recorded step, with gradients", "score the recorded x'\nlog p_new - log p_old = log r"))
    for axis, (title, said) in zip(axes, rows):
        axis.axis("off")
        axis.set(xlim=(0, 10), ylim=(-0.25, 1.35), title=title)
        box(axis, 0.1, 0.2, 1.9, "pipeline.__call__\nprompt, size, guidance", COLOURS[2])
        box(axis, 2.8, 0.2, 1.7, "denoiser + LoRA\nat state x, sigma", COLOURS[0])
        box(axis, 5.3, 0.2, 1.8, "PolicyScheduler.step\nmodel output to kernel", COLOURS[1])
        box(axis, 7.8, 0.2, 2.1, said, COLOURS[3])
        for start in (2.05, 4.55, 7.15):
            arrow(axis, (start, 0.51), (start + 0.7, 0.51))
        if said.startswith("draw"):
            axis.add_patch(FancyArrowPatch((6.2, 0.88), (3.65, 0.88), connectionstyle="arc3,rad=0.25",
                                           arrowstyle="-|>", mutation_scale=10, color=FAINT, lw=1.1))
            axis.text(4.9, 1.26, "next state, until sigma = 0", fontsize=7.5, color=FAINT, ha="center")
    save(figure, FOLDER / "slot.png")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with figure_style() as pyplot:
        for draw in (draw_steps, draw_plans, draw_trees, draw_slot):
            draw(pyplot)
            print(f"{draw.__name__}: written to {FOLDER}", flush=True)


if __name__ == "__main__":
    main()
