"""The README's table: every method on the starter, from the same budget of denoiser evaluations.

    python scripts/bench_starter.py --output runs/bench     # go on after an interruption: the same line

One run of `flowgrpo train` per method and seed, in a process of its own, all from the demo's recipe, with six steps,
micro-batches of 192 in bf16, and 240 held-out prompts. The budget counts rows that go through the denoiser in training:
previews, rollouts, replays, replays of the reference where the method has a KL, and the check of the first ratio;
evaluation does not count. What an epoch costs is known beforehand from the method's plan, so each run is given the
number of epochs that first reaches the budget, and its learning-rate schedule ends there; where a run counts otherwise,
that is printed. Backward passes are not counted, but seconds are.

A gain is the strict accuracy on held-out prompts (mean over tasks) after training, with the evaluation sampler, less
the base's at the best of several guidance scales. It is measured on the way as well, --points times in all. Written to
--output: results.json, table.md, and plot.png, which needs matplotlib (pip install matplotlib). Finished runs are not
run again; remove a run's folder to repeat it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

from common import RECIPE, options
from evaluate_starter import GUIDANCE, accuracy

from flowgrpo.advantages.selection import BestWorst
from flowgrpo.config import Config, load
from flowgrpo.config.sections import Adapter
from flowgrpo.data import splits
from flowgrpo.device import pick_device
from flowgrpo.evaluation import measured
from flowgrpo.evaluation.pages import figures
from flowgrpo.methods import validate
from flowgrpo.methods.method import Method
from flowgrpo.methods.targets import LatentEdits
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.precision import settle
from flowgrpo.samplers import cost
from flowgrpo.samplers.grids import shifted
from flowgrpo.samplers.reward_gradient import Unroll
from flowgrpo.samplers.rollout import RolloutSpec

METHODS = ("flow_grpo", "dance_grpo", "mix_grpo", "mix_grpo_flash", "mix_grpo+grpo_guard")
SOFT = {"reward": "{scene_soft: 1.0}", "eval.rewards": "[scene]"}  # a reward's gradient needs one that has it
# Of what train_starter_reward.py teaches.
LEARNED = {"method": "mix_grpo+grpo_guard", "reward": "{runs/starter_reward/reward: 1.0}", "eval.rewards": "[scene]"}
# Of what train_starter_answers.py teaches.
ANSWERED = {"method": "mix_grpo+grpo_guard", "eval.rewards": "[scene]", "reward":
            "{question_answers: {args: {by: runs/starter_answers/answers, score: probability}}}"}
# Of the text encoder and the denoiser together.
BOTH = {"method": "mix_grpo+grpo_guard+texforce", "parts": "{adapted: {denoisers: true}}"}
# A critic chooses every held-out picture from four bases, whose evaluations do not count, and their edits.
EDITED = {"method": "expo", "train.lr": "1.0e-3", "train.inner_epochs": "2", "train.group": "16",
          "parts": "{edit: {candidates: 4}}"}
# On the four steps of a model of its own, which begins elsewhere.
CONSISTENCY = {"model": "starter_consistency", "train.steps": "4", "train.grid": "stock", "eval.steps": "4",
               "eval.guidance": "1.0"}
# Of what make_starter_pairs.py draws, once and outside the budget: 21,600 evaluations. About as many epochs as others
# have; the parts are those of configs/starter_dpo.yaml, without its term that trains on the chosen pictures alone, and
# of configs/starter_rpo.yaml.
PAIRS = {"train.group": "2", "train.prompts": "96"}
OFFLINE = PAIRS | {"method": "diffusion_dpo", "preferences": "runs/starter_pairs/pairs.jsonl", "train.lr": "1.0e-3",
                   "parts": "{surrogate: {beta: 500.0}, times: {count: 2, low: 0.4, shared: true}}"}
SUBJECTS = PAIRS | {"preferences": "runs/starter_pairs/subjects.jsonl", "labels": "rewards", "eval.rewards": "[scene]",
                    "parts": "{shaping: {scale: 10.0}, times: {count: 2, low: 0.3}}",
                    "reward": "{train: {use: harmonic, args: {rewards: [sharpness, scene_graded], share: 0}}}"}
# Two passes over every batch: in one, a policy that has not moved, a mask or clip never acts.
TWICE = {"train.inner_epochs": "2"}
PREVIEW = {"parts": "{preview: {pool: 48, steps: 4}}"}  # smaller than published
# What a method needs beside its name; the published splits are those of a grid of 20 steps.
OPTIONS = {"branch_grpo": {"parts": "{plan: {splits: [0, 1, 2, 3]}}"}, "refl": SOFT, "draft": SOFT, "alignprop": SOFT,
           "offline_dpo": OFFLINE, "rpo": SUBJECTS, "learned_reward": LEARNED, "own_answers": ANSWERED,
           "rlcm": CONSISTENCY, "texforce_both": BOTH, "expo": EDITED,
           "flow_grpo_twice": TWICE | {"method": "flow_grpo"},
           "flow_dppo_twice": TWICE | {"method": "flow_grpo+flow_dppo"}, "flow_grpo+sol_rl": PREVIEW,
           "sol_rl+diffusion_nft": PREVIEW}
MEASURED = "scene"  # strict: every claim of the prompt is true


def epoch_cost(config: Config, epoch: int) -> int:
    """Denoiser evaluations of one epoch without rescoring, on a pipeline that doubles its batch under guidance.

    Recorded pairs are not drawn; what it took to draw them once is no epoch's.
    """
    method, train = validate.resolve(config), config.train
    drawn = train.group // 2 if isinstance(method.target, LatentEdits) else train.group  # the other half are edits
    explorations = method.explorations(shifted(train.steps, train.shift), drawn, train.shift, epoch, config.seed)
    doubled = 2 if train.guidance > 1 else 1
    if method.target.follows_reward:
        return doubled * _backprop_cost(config, method.target.backprop, explorations[0], epoch)
    if isinstance(method.target, LatentEdits):
        return doubled * cost.rollout(explorations, train.prompts)
    noised = method.noised(shifted(train.steps, train.shift), train.group, epoch, config.seed)
    own = kept(method, train.group)
    cut = method.loss.surrogate.reads_groups and (own * train.group > train.micro_batch or train.pack)
    reference = method.loss.kl.weight > 0 or method.compares_with_reference  # whose scores serve all inner epochs
    passes = train.inner_epochs * (1 + cut) + reference + (epoch == 0)
    spent = 0 if config.preferences else cost.rollout(explorations, train.prompts)
    spent += round(own * cost.update([noised] if noised else explorations, train.prompts, passes))
    spent += cost.update([noised], train.prompts, 1) if noised else 0  # the old scores, before samples are chosen
    spent += cost.preview(method.rollout.preview, train.prompts)
    return doubled * spent


def kept(method: Method, group: int) -> float:
    """The share of a group's samples that are trained, where their number is known beforehand; else 1."""
    return method.credit.selection.n / group if isinstance(method.credit.selection, BestWorst) else 1.0


def _backprop_cost(config: Config, ending: Any, exploration: RolloutSpec, epoch: int) -> int:
    """The rollout, and for every replay the steps of the graph."""
    [begin], train = exploration.schedule.trained, config.train
    steps = exploration.steps - begin if isinstance(ending, Unroll) else 1
    return train.prompts * train.group * (begin + steps * (1 + (epoch == 0) + train.inner_epochs))


def epochs_for(config: Config, budget: int) -> tuple[int, int]:
    """The fewest epochs that reach the budget, and what they cost together."""
    total = 0
    for epoch in count():
        total += epoch_cost(config, epoch)
        if total >= budget:
            return epoch + 1, total


def train(config: Config, foretold: int) -> dict[str, Any]:
    """The summary of a run, which is made in another process if need be. SystemExit where the folder holds another."""
    summary, resolved = config.folder / "summary.json", config.folder / "config.yaml"
    if not summary.exists():
        config.folder.mkdir(parents=True, exist_ok=True)
        recipe = config.folder / "recipe.yaml"
        recipe.write_text(config.yaml(), encoding="utf-8")
        resume = ["--resume"] if list((config.folder / "checkpoints").glob("epoch-*")) else []
        subprocess.run([sys.executable, "-m", "flowgrpo", "train", str(recipe), *resume], check=True)
    if resolved.read_text(encoding="utf-8") != config.yaml():
        sys.exit(f"{config.folder} was made with another recipe or budget: remove it, or use another --output")
    found = json.loads(summary.read_text())
    if found["denoiser_evaluations"] != foretold:
        print(f"{config.folder}: {found['denoiser_evaluations']} evaluations counted, {foretold} foretold", flush=True)
    return found


def base(config: Config, file: Path) -> dict[str, Any]:
    """The base's accuracy per guidance scale, with the evaluation's steps, prompts and samples; kept in `file`."""
    asked = {"model": config.model, "guidance": list(GUIDANCE), "eval": config.eval.model_dump(exclude={"guidance"})}
    if file.exists() and (known := json.loads(file.read_text()))["asked"] == asked:
        return known
    device = pick_device(config.device)
    precision = settle(config, device)[0].precision
    policy = PipelinePolicy(load_pipeline(config.model, precision), Adapter(rank=0), precision=precision, device=device,
                            call=config.call)
    prompts = measured.spread(splits.resolve(config)[1], config.eval.prompts)
    found = {f"{guidance:g}": accuracy(policy, prompts, config.eval.steps, guidance, config.eval.samples,
                                       config.train.micro_batch)["all"] for guidance in GUIDANCE}
    best = max(found, key=found.get)
    told = {"asked": asked, "accuracy": found, "best_guidance": float(best), "best": found[best]}
    file.write_text(json.dumps(told, indent=2) + "\n")
    return told


def result(method: str, config: Config, summary: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """What a finished run says of itself; seconds are those of training, without the measurements between."""
    tasks, lines = summary["tasks"][MEASURED]["after"], metrics(config.folder)
    trained, seconds = next(iter(config.rewards)), 0.0
    curve, held_out = [], [(0, 0.0, base["best"])]
    for line in lines:
        seconds += sum(value for key, value in line.items() if key.startswith("seconds/"))
        curve.append((line["evaluations"], line[f"reward/{trained}/mean"]))
        if f"held_out/{MEASURED}" in line and line is not lines[-1]:
            held_out.append((line["evaluations"], seconds, line[f"held_out/{MEASURED}"]))
    held_out.append((summary["denoiser_evaluations"], seconds, summary["after"][MEASURED]))
    return {"method": method, "seed": config.seed, "base": base["best"], "accuracy": mean(tasks.values()),
            "tasks": tasks, "seconds": seconds, "epochs": summary["epochs"],
            "evaluations": summary["denoiser_evaluations"], "first_log_ratio": summary["max_first_log_ratio"],
            "curve": curve, "held_out": held_out}


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def table(results: list[dict[str, Any]], base: dict[str, Any]) -> str:
    """A markdown table: a line for the base and one per method, over its seeds."""
    lines = ["| method | held-out accuracy | min..max | gain over the base | epochs | evaluations | seconds |",
             "|---|---:|---:|---:|---:|---:|---:|",
             f"| base, guidance {base['best_guidance']:g} | {base['best']:.3f} | | | | | |"]
    for method in dict.fromkeys(found["method"] for found in results):
        runs = [found for found in results if found["method"] == method]
        scores, (epochs, evaluations, seconds) = [run["accuracy"] for run in runs], (
            mean(run[key] for run in runs) for key in ("epochs", "evaluations", "seconds"))
        lines.append(f"| {method} | {mean(scores):.3f} | {min(scores):.3f}..{max(scores):.3f} | "
                     f"{mean(scores) - runs[0]['base']:+.3f} | {epochs:.0f} | {evaluations:,.0f} | {seconds:.0f} |")
    return "\n".join(lines) + "\n"


def plot(results: list[dict[str, Any]], base: dict[str, Any], path: Path) -> None:
    """Training reward over evaluations (a line per run), and held-out accuracy per method (a dot per run)."""
    names = dict.fromkeys(run["method"] for run in results)
    with figures.styled() as pyplot:
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, max(4, 0.3 * len(names))), width_ratios=(3, 2))
        for place, method in enumerate(names):
            runs, style = [run for run in results if run["method"] == method], figures.line_style(place)
            for run in runs:
                at, reward = zip(*run["curve"])
                left.plot(at, _smooth(reward), **style, lw=1, label=method if run is runs[0] else None)
            scores = [run["accuracy"] for run in runs]
            right.plot(scores, [place] * len(scores), "o", color=style["color"], alpha=0.6)
            right.plot(mean(scores), place, "|", color=style["color"], ms=22, mew=2)
        right.axvline(base["best"], color=figures.INK, lw=1, ls="--", label=f"base, guidance {base['best_guidance']:g}")
        right.set(xlabel="held-out accuracy (strict)", yticks=range(len(names)), ylim=(len(names) - 0.5, -0.5),
                  yticklabels=names)
        left.set(xlabel="denoiser evaluations", ylabel="training reward (mean over 10 epochs)")
        left.legend()
        right.legend()
        figures.save(figure, path)


def _smooth(values: tuple[float, ...], width: int = 10) -> list[float]:
    return [mean(values[max(0, i - width + 1):i + 1]) for i in range(len(values))]


def run_all(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every method with every seed: (what each run gave, the base's accuracy). The files are written after each run."""
    args.output.mkdir(parents=True, exist_ok=True)
    # Without the recipe's own parts, which fit one method: every method has its published ones.
    settled = {"output": str(args.output), "tracker": "none", "precision": "bf16", "train.prompts": "6",
               "train.micro_batch": "192", "train.steps": "6", "eval.prompts": "240"} | options(args.option)
    before, results = base(load(RECIPE, settled), args.output / "base.json"), []
    for seed in args.seeds:
        for method in args.methods:
            named = {"method": method, "seed": str(seed), "name": f"{method}-seed{seed}", "parts": "{}"}
            named |= OPTIONS.get(method, {})
            epochs, foretold = epochs_for(load(RECIPE, settled | named), args.budget)
            length = {"train.epochs": str(epochs), "eval.every": str(-(-epochs // args.points))}
            config = load(RECIPE, settled | named | length)
            if args.finished and not (config.folder / "summary.json").exists():
                continue
            own = before if config.model == before["asked"]["model"] else base(
                config, args.output / f"base-{config.model}.json")
            results.append(result(method, config, train(config, foretold), own))
            results.sort(key=lambda found: args.methods.index(found["method"]))
            write(args.output, args.budget, before, results)
    return results, before


def arguments(description: str, methods: tuple[str, ...]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=40_000, help="denoiser evaluations per run")
    parser.add_argument("--methods", nargs="+", default=methods)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--points", type=int, default=3, help="measurements of the held-out accuracy per run")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"))
    parser.add_argument("--finished", action="store_true", help="tell of finished runs, and make none")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="override of the recipe")
    return parser


def write(output: Path, budget: int, before: dict[str, Any], results: list[dict[str, Any]]) -> None:
    told = {"budget": budget, "base": before, "runs": results}
    (output / "results.json").write_text(json.dumps(told) + "\n")
    (output / "table.md").write_text(table(results, before))
    print("\n" + table(results, before), flush=True)
    if importlib.util.find_spec("matplotlib"):
        plot(results, before, output / "plot.png")
    else:
        print("no plot.png: pip install matplotlib", flush=True)


if __name__ == "__main__":
    run_all(arguments(__doc__, METHODS).parse_args())
