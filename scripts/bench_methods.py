"""docs/benchmark.md and its picture: every preset that trains the starter's flow, from the same budget of evaluations.

    python scripts/bench_methods.py --output runs/bench     # go on after an interruption: the same line

The runs are those of bench_starter.py, with more methods: the same folder holds both. Needs matplotlib
(pip install matplotlib). The page is written from finished runs; its numbers are nobody's to edit.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from bench_starter import MEASURED, arguments, run_all, table
from first_ratio import METHODS as RECORDED

from flowgrpo.evaluation.pages import figures
from flowgrpo.methods import preset
from flowgrpo.methods.presets import suited
from flowgrpo.methods.targets import JointDensity, RecordedSteps

DOCS = Path(__file__).parent.parent / "docs"
PARENT = "flow_grpo"
METHODS = [*RECORDED, *(name for name in suited("flow")
                        if not isinstance(preset(name).target, (RecordedSteps, JointDensity))),
           "sol_rl+diffusion_nft", "texforce_both", "offline_dpo", "learned_reward", "own_answers", "flow_grpo_twice",
           "flow_dppo_twice"]


def course(results: list[dict[str, Any]], method: str) -> list[tuple[float, float, float]]:
    """(evaluations, seconds, held-out accuracy) on the way, the mean over a method's seeds; the base comes first."""
    runs = [found["held_out"] for found in results if found["method"] == method]
    return [tuple(mean(values) for values in zip(*points, strict=True)) for points in zip(*runs, strict=True)]


def needed(points: list[tuple[float, float, float]], accuracy: float) -> float | None:
    """The evaluations after which the accuracy is reached, on straight lines between the points; None: never."""
    for (before, _, low), (after, _, high) in zip(points, points[1:]):
        if low < accuracy <= high:
            return before + (after - before) * (accuracy - low) / (high - low)
    return None


def reaching(results: list[dict[str, Any]]) -> str:
    """A markdown table: what every method needs for the accuracy at which flow_grpo ends."""
    goal, budget = course(results, PARENT)[-1][2], course(results, PARENT)[-1][0]
    lines = [f"| method | evaluations to {goal:.3f} | share of `{PARENT}`'s |", "|---|---:|---:|"]
    for method in dict.fromkeys(found["method"] for found in results):
        count = needed(course(results, method), goal)
        lines.append(f"| {method} | not reached | |" if count is None else
                     f"| {method} | {count:,.0f} | {count / budget:.2f} |")
    return "\n".join(lines) + "\n"


def losers(results: list[dict[str, Any]]) -> list[str]:
    """The methods that end no higher than flow_grpo does."""
    goal = course(results, PARENT)[-1][2]
    return [method for method in dict.fromkeys(found["method"] for found in results)
            if method != PARENT and course(results, method)[-1][2] <= goal]


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Held-out accuracy against denoiser evaluations and against seconds of training, the mean over seeds."""
    with figures.styled() as pyplot:
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 6.5), sharey=True)
        for number, method in enumerate(dict.fromkeys(run["method"] for run in results)):
            evaluations, seconds, accuracy = zip(*course(results, method))
            style = {"color": figures.INK, "lw": 2.8} if method == PARENT else figures.line_style(number) | {"lw": 1.3}
            left.plot(evaluations, accuracy, marker=".", label=method, **style)
            right.plot(seconds, accuracy, marker=".", **style)
        left.set(xlabel="denoiser evaluations", ylabel=f"held-out accuracy ({MEASURED}, strict)")
        right.set(xlabel="seconds of training")
        figure.legend(loc="outside right center", fontsize=8)
        figures.save(figure, path)


PAGE = """# Benchmark

Written by `python scripts/bench_methods.py{options}`; do not edit.

Every preset that trains the starter's flow, with seeds {seeds}, from {budget:,} denoiser evaluations each (the epoch
that reaches the budget is finished). Learning rate, adapter and group are the demo's for all of them, with six steps,
the parts each method's published ones, and none was tuned but where it is said. One number was changed after a first
run had been seen: the weight of `tree_rpo`'s supervised term, which is ours and not its paper's, from 1e-2, which
blanked all pictures within ten epochs, to 1e-4. With one update per batch `flow_dppo`'s mask never acts: its runs are
those of its host; `flow_grpo_twice` and `flow_dppo_twice` are both with two passes over every batch
(`train.inner_epochs: 2`). `sol_rl` looks at 48 noises per prompt in 4 steps here, where 96 in 6 are published and the
preset's own. `refl`, `draft` and `alignprop` follow the gradient of `scene_soft`; `learned_reward` is
`mix_grpo+grpo_guard` on what `scripts/train_starter_reward.py` taught a network, `own_answers` on what
`scripts/train_starter_answers.py` did; `texforce_both` is that method with the text encoder's LoRA beside the
denoiser's; `expo` leaves the denoiser alone, and its held-out pictures are the critic's choices, each of four bases and
their edits, for four times the evaluations (its seconds leave out the steps of its critic, which took seven times as
long); `offline_dpo` and `rpo` draw nothing and train on the pairs of `scripts/make_starter_pairs.py`; all others train
on `scene` and `scene_graded`. Those pairs cost 21,600 evaluations outside of the budget, beta, times and learning rate
of these two were found by trial, and of `rpo`'s pairs one picture is a rendered scene, so that it is shown right ones
([more](preferences.md#on-the-starter)). `rlcm` begins with `starter_consistency` and its four steps: its gain is over
that model. Accuracy is strict, on {prompts} held-out prompts, with the card's sampler. The runs are of one machine, two
at a time and beside other work: seconds are rough. {fewer} ![Held-out accuracy against evaluations and
seconds](benchmark.png)

{table}
What each needs for the accuracy at which `{parent}` ends, on straight lines between {points} measurements:

{reaching}
{losers}
"""


def fewer(results: list[dict[str, Any]], seeds: list[int]) -> str:
    """Which methods have not been run with all seeds, or not at all."""
    made = {method: [found["seed"] for found in results if found["method"] == method]
            for method in dict.fromkeys(found["method"] for found in results)}
    short = {method: own for method, own in made.items() if len(own) < len(seeds)}
    told = "".join(f"\n- `{method}`: {', '.join(map(str, sorted(own)))}" for method, own in short.items())
    absent = ", ".join(f"`{method}`" for method in METHODS if method not in made)
    return (f"\nWith fewer seeds:\n{told}\n" if told else "") + (f"\nNot run yet: {absent}.\n" if absent else "")


def page(results: list[dict[str, Any]], before: dict[str, Any], args) -> str:
    told = losers(results)
    changed = "".join(f" --{name} {value}" for name, value in (("budget", args.budget), ("points", args.points)))
    return PAGE.format(options=changed, seeds=", ".join(map(str, args.seeds)), budget=args.budget, points=args.points,
                       prompts=before["asked"]["eval"]["prompts"], table=table(results, before), parent=PARENT,
                       reaching=reaching(results),
                       fewer=fewer(results, args.seeds),
                       losers=f"Did not end higher than `{PARENT}` here: {', '.join(told)}." if told else
                       f"All ended higher than `{PARENT}` here.")


def main() -> None:
    args = arguments(__doc__, METHODS).parse_args()
    results, before = run_all(args)
    plot(results, DOCS / "benchmark.png")
    (DOCS / "benchmark.md").write_text(page(results, before, args), encoding="utf-8")


if __name__ == "__main__":
    main()
