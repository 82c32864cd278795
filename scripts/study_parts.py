"""Study of parts: train the text starter with and without each of several parts, and test the claimed effects.

    python scripts/study_parts.py --output runs/study --seeds 3                      # under an hour of one core
    python scripts/study_parts.py --output runs/tried --side validation --only Hints # to choose options

The same command resumes: finished runs are kept, and one that was interrupted goes on. Rows are those of
study_rows.py. Writes results.json and results.md to the output folder; study_page.py makes the page of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from study_rows import ALL, BASE, FIVE, KNOWN, POOLS, ROWS, Options, Row
from study_statistics import compared, judged, table

from flowgrpo.bench import models, probe
from flowgrpo.config import parse
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import as_line
from flowgrpo.evaluation.measured import EVAL_SEED, spread
from flowgrpo.log import silence
from flowgrpo.run import run
from flowgrpo.starter.arithmetic import Problem, draw, solution
from flowgrpo.storage import atomic, checkpoint
from flowgrpo.storage.json_files import read_object
from flowgrpo.training import state

PROMPTS, SAMPLES = 100, 8  # measured prompts that are sampled at temperature 1, and the samples of each
MASTERED = 600  # prompts of the pool KNOWN
SIDES = {"train": (False, 600), "validation": (False, 200), "held_out": (True, 300)}  # of sums of five numbers
ROOT = Path(__file__).parent.parent
MEND = "remove the run's folder, and the same command trains it again"


# --- prompts ----------------------------------------------------------------------------------------------------------


def write_prompts(folder: Path) -> None:
    """Write POOL-SIDE.jsonl for every pool and side."""
    split = {side: [as_line(prompt) for prompt in prompts] for side, prompts in models.split(BASE["model"]).items()}
    five = {side: [line(problem) for problem in problems] for side, problems in fives().items()}
    lines = {ALL: split, FIVE: five, KNOWN: split | {"train": mostly_known(split["train"])}}
    for pool, sides in lines.items():
        for side in SIDES:
            atomic.write_text(folder / f"{pool}-{side}.jsonl", "".join(json.dumps(each) + "\n" for each in sides[side]))


def mostly_known(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a fourth of other prompts, evenly spaced, beside sums that the base has mastered; `source` tells them.

    Mastered are sums that the careless pupil, who taught the base, got right twenty times.
    """
    dice, known = random.Random(6), dict[str, Any]()
    while len(known) < MASTERED:
        problem = draw(dice, False)
        if all(problem.careless(dice) == problem.steps for _ in range(20)):
            known[problem.prompt] = line(problem)
    others = lines[::3 * len(lines) // MASTERED]
    return [each | {"metadata": each["metadata"] | {"source": source}}
            for source, side in (("mastered", [*known.values()]), ("recipe", others)) for each in side]


def fives() -> dict[str, list[Problem]]:
    """Return different sums of five numbers for every side, drawn by a fixed seed."""
    dice, known, sides = random.Random(5), set[Problem](), {}
    for side, (held_out, count) in SIDES.items():
        sides[side] = list[Problem]()
        while len(sides[side]) < count:
            problem = draw(dice, held_out, 5)
            if problem not in known:
                known.add(problem)
                sides[side].append(problem)
    return sides


def line(problem: Problem) -> dict[str, Any]:
    """Return a problem as a line of a prompt file, with the first half of its partial sums as a hint."""
    half = problem.steps[:len(problem.steps) // 2]
    hints = {"hints": [solution(half) + ";"]} if half else {}
    return {"prompt": problem.prompt, "metadata": {
        "answer": str(problem.answer), "solution": solution(problem.steps), "task": problem.task, **hints}}


# --- runs -------------------------------------------------------------------------------------------------------------


def configured(args: argparse.Namespace, pool: str, name: str, options: Options, seed: int) -> Config:
    """Return the configuration of a run; its folder's name has a hash of the options."""
    said = json.dumps([pool, args.side, options, args.prompts], sort_keys=True)
    label = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
    folder = args.output / "prompts"
    return parse.load(None, options | {
        "seed": seed, "output": str(args.output / "runs"), "eval.prompts": args.prompts,
        "name": f"{pool}-{label}-seed{seed}-{hashlib.sha256(said.encode()).hexdigest()[:8]}",
        "prompts": str(folder / f"{pool}-train.jsonl"), "held_out": str(folder / f"{pool}-{args.side}.jsonl")})


def finished(config: Config) -> dict[str, Any]:
    """Train a run unless it is finished, measure it, and return its scores per prompt."""
    file = config.folder / "study.json"
    if not file.is_file():
        if not (config.folder / "summary.json").is_file():
            run(config, resume=checkpoint.latest(config.folder / "checkpoints") is not None)
        after = read_object(config.folder / "report" / "after.json", MEND)["scores"]["numeric_match"]
        spent = read_object(config.folder / "summary.json", MEND)["denoiser_evaluations"]
        atomic.write_text(file, json.dumps({"accuracy": after, "evaluations": spent} | sampled(config)))
    return read_object(file, MEND)


def sampled(config: Config) -> dict[str, list[float]]:
    """Return quantities of samples at temperature 1, per prompt.

    entropy: of a whole completion, in nats, as the mean of -log p. kl: to the base, of a whole completion.
    """
    trainer, last = probe.trainer_of(config), checkpoint.latest(config.folder / "checkpoints")
    assert last is not None, f"{config.folder} has no checkpoint"
    state.restore(trainer, last)
    policy, prompts = trainer.policy, spread(trainer.held_out, PROMPTS)
    sampler = probe.trainer_of(parse.load(None, BASE | {
        "seed": EVAL_SEED, "prompts": config.prompts, "held_out": config.held_out, "train.prompts": len(prompts),
        "train.group": SAMPLES, "train.updates": 1}), policy)
    with torch.no_grad():
        parts, conditioning, scores = sampler.sample(prompts)
        with policy.reference():
            base = [scored for part in parts for _, _, scored in sampler.rollouts.replay(part, conditioning)]
    old = [cast(Any, part.transitions[0]).old for part in parts]
    entropy = [-(each.logp * each.mask).sum(1) for each in old]
    kl = [((each.logp - other.logp) * each.mask).sum(1) for each, other in zip(old, base)]
    right = scores[..., 0] == 1
    return {"pass@8": right.any(1).double().tolist(), "entropy": by_prompt(entropy), "kl": by_prompt(kl)}


def by_prompt(values: Iterable[torch.Tensor]) -> list[float]:
    """Return the mean over the samples of every prompt; rows are prompt by prompt."""
    return torch.cat([*values]).view(-1, SAMPLES).double().mean(1).tolist()


# --- results ----------------------------------------------------------------------------------------------------------


def results(args: argparse.Namespace) -> dict[str, Any]:
    """Train and measure all runs of the chosen rows, and return what the page shows."""
    known: dict[Path, dict[str, Any]] = {}

    def arm(row: Row, name: str, options: Options) -> list[dict[str, Any]]:
        name = "base" if options == BASE else name
        configs = [configured(args, row.pool, name, options, seed) for seed in range(args.seeds)]
        for config in configs:
            known[config.folder] = known.get(config.folder) or finished(config)
        return [known[config.folder] for config in configs]

    rows = []
    for row in (row for row in ROWS if not args.only or row.name in args.only):
        without, having = arm(row, f"{row.name}-without", row.without), arm(row, row.name, row.options)
        rows.append(result(row, without, having))
        sides = [" ".join(f"{seed:.3f}" for seed in rows[-1][side]) for side in ("without", "with")]
        print(f"{row.name}, {row.pool}: {row.quantity} {sides[0]} -> {sides[1]}, p {rows[-1]['p']:.3f}", flush=True)
    return {"commit": commit(), "seeds": args.seeds, "side": args.side, "prompts": args.prompts,
            "sampled": [PROMPTS, SAMPLES], "fives": SIDES["train"][1], "known": MASTERED,
            "rows": judged(rows)}


def commit() -> str:
    """Return the last commit that changed the package, empty outside of a repository."""
    command = ["git", "log", "-1", "--format=%h", "--", "flowgrpo"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def result(row: Row, without: list[dict[str, Any]], having: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the comparison of a row's finished runs, one per seed and arm."""
    scores = [np.array([run[row.quantity] for run in side], dtype=float) for side in (without, having)]
    spent = [sum(run["evaluations"] for run in side) for side in (having, without)]
    accuracy = [float(np.mean([run["accuracy"] for run in side])) for side in (without, having)]
    return {"name": row.name, "claim": row.claim, "quantity": row.quantity, "pool": POOLS[row.pool],
            **compared(*scores), "accuracy": accuracy, "evaluations": spent[0] / spent[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/study"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--side", choices=("held_out", "validation"), default="held_out")
    parser.add_argument("--prompts", type=int, default=300, help="measured prompts")
    parser.add_argument("--only", action="append", choices=sorted({row.name for row in ROWS}),
                        help="a part; may be repeated")
    args = parser.parse_args()
    silence()
    torch.set_num_threads(1)
    write_prompts(args.output / "prompts")
    told = results(args)
    atomic.write_text(args.output / "results.json", json.dumps(told, indent=1) + "\n")
    atomic.write_text(args.output / "results.md", "\n".join(table(told["rows"])) + "\n")


if __name__ == "__main__":
    main()
