"""Study of parts: train starters with and without each of several parts, and test the claimed effects.

    python scripts/measure/study_parts.py --output runs/study --seeds 3                          # two hours of one core
    python scripts/measure/study_parts.py --output runs/tried --side validation --seeds 1        # to choose settings

The same command resumes: finished runs are kept, and one that was interrupted goes on. Rows are those of
study_rows.py, on validation prompts those of study_candidates.py, with other seeds. Writes results.json and results.md
to the output folder after every row; study_page.py makes the page of them.
"""

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import study_measures
import torch
from PIL import Image
from study_candidates import CANDIDATES
from study_measures import MEND, PICTURED, PROMPTS, SAMPLES
from study_rows import ROWS
from study_settings import ALL, FIVE, IMAGES, KNOWN, POOLS, SCENES, TEXTS, Options, Row
from study_statistics import KEYS, compared, judged, table

from flowgrpo.config import parse
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt, as_line
from flowgrpo.log import silence
from flowgrpo.run import run
from flowgrpo.starter import scenes
from flowgrpo.storage import atomic, checkpoint
from flowgrpo.storage.json_files import read_object
from flowgrpo.tools.bench import models

sys.path.append(str(Path(__file__).parents[1] / "build"))
from starter_sums import Problem, draw, solution  # noqa: E402 -- of a folder beside

MASTERED = 600  # prompts of the pool KNOWN
SIDES = {"train": (False, 600), "validation": (False, 200), "held_out": (True, 300)}  # of sums of five numbers
TRIED = 10  # first seed of runs that are measured on validation prompts
ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "data" / "studies.json"


# --- prompts ----------------------------------------------------------------------------------------------------------


def write_prompts(folder: Path) -> None:
    """Write POOL-SIDE.jsonl for every pool and side."""
    split = {side: [as_line(prompt) for prompt in prompts] for side, prompts in models.split(TEXTS["model"]).items()}
    five = {side: [line(problem) for problem in problems] for side, problems in fives().items()}
    drawn = models.split(IMAGES["model"])
    lines = {ALL: split, FIVE: five, KNOWN: split | {"train": mostly_known(split["train"])},
             SCENES: {side: [as_line(prompt) for prompt in prompts] for side, prompts in drawn.items()}}
    write_images(folder, drawn["train"])
    for pool, sides in lines.items():
        for side in SIDES:
            atomic.write_text(folder / f"{pool}-{side}.jsonl", "".join(json.dumps(each) + "\n" for each in sides[side]))


def write_images(folder: Path, prompts: list[Prompt]) -> None:
    """Write a right image of every prompt, by a fixed seed, and scenes-images.jsonl."""
    rng, lines = np.random.default_rng(7), []
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for number, prompt in enumerate(prompts):
        name, image = f"pictures/{number}.png", scenes.render(scenes.parse(prompt.text), rng)
        Image.fromarray((image * 255).round().astype(np.uint8)).save(folder / name)
        lines.append(json.dumps({"prompt": prompt.text, "image": name}) + "\n")
    atomic.write_text(folder / "scenes-images.jsonl", "".join(lines))


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
    placed = json.loads(json.dumps(options).replace("{prompts}", folder.as_posix()))
    return parse.load(None, {"eval.prompts": args.prompts} | placed | {
        "seed": seed, "output": str(args.output / "runs"),
        "name": f"{pool}-{label}-seed{seed}-{hashlib.sha256(said.encode()).hexdigest()[:8]}",
        "prompts": str(folder / f"{pool}-train.jsonl"), "held_out": str(folder / f"{pool}-{args.side}.jsonl")})


def finished(config: Config, prompts: int, rlg: float | None) -> dict[str, Any]:
    """Train a run unless it is finished, measure it unless it is measured, and return its scores per prompt."""
    file = config.folder / f"study{'' if rlg is None else f'-rlg-{rlg}'}.json"
    if not file.is_file():
        if not (config.folder / "summary.json").is_file():
            run(config, resume=checkpoint.latest(config.folder / "checkpoints") is not None)
        text = config.model == TEXTS["model"]
        scores = study_measures.texts(config) if text else study_measures.images(config, prompts, rlg)
        spent = read_object(config.folder / "summary.json", MEND)["denoiser_evaluations"]
        atomic.write_text(file, json.dumps({"evaluations": spent, "commit": commit()} | scores))
    return read_object(file, MEND)


# --- results ----------------------------------------------------------------------------------------------------------


def study(args: argparse.Namespace) -> None:
    """Train and measure all runs of the chosen rows; write the results after every row."""
    tried, known = args.side == "validation", dict[tuple[Path, float | None], dict[str, Any]]()

    def arm(row: Row, name: str, options: Options, rlg: float | None = None) -> list[dict[str, Any]]:
        name = "base" if options == row.world else name
        seeds = range(TRIED * tried, TRIED * tried + args.seeds)
        configs = [configured(args, row.pool, name, options, seed) for seed in seeds]
        for config in configs:
            at = config.folder, rlg
            known[at] = known.get(at) or finished(config, args.prompts, rlg)
        return [known[config.folder, rlg] for config in configs]

    rows = []
    bases = {POOLS[pool]: base_accuracy(args, pool) for pool in args.pool or POOLS}
    for row in (row for row in (CANDIDATES if tried else ROWS) if row.key in asked(args)):
        without = arm(row, f"{row.name}-without", row.without)
        rows.append(result(row, without, arm(row, row.name, row.options, row.rlg)))
        sides = [" ".join(f"{seed:.3f}" for seed in rows[-1][side]) for side in ("without", "with")]
        print(f"{', '.join(filter(None, row.key))}: {row.quantity} {sides[0]} -> {sides[1]}, "
              f"p {rows[-1]['p']:.3f}, accuracy {rows[-1]['accuracy']}", flush=True)
        write(args.output, results(args, rows, bases))
    write(args.output, results(args, rows, bases))


def base_accuracy(args: argparse.Namespace, pool: str) -> float:
    """Return the accuracy of the untrained model on a pool."""
    options = IMAGES if pool == SCENES else TEXTS
    return study_measures.base_accuracy(configured(args, pool, "base", options, 0), args.prompts)


def write(output: Path, told: dict[str, Any]) -> None:
    """Write the results to a folder."""
    atomic.write_text(output / "results.json", json.dumps(told, indent=1) + "\n")
    atomic.write_text(output / "results.md", "\n".join(table(told["rows"])) + "\n")


def asked(args: argparse.Namespace) -> set[tuple[str, str, str]]:
    """Return the keys of the rows that the options name."""
    there = {tuple(row[key] for key in KEYS) for row in read_object(DATA, MEND)["rows"]} if args.new else set()
    return {row.key for row in ROWS + CANDIDATES if (not args.only or row.name in args.only)
            and (not args.pool or row.pool in args.pool) and row.key not in there}


def results(args: argparse.Namespace, rows: list[dict[str, Any]], bases: dict[str, float]) -> dict[str, Any]:
    """Return what the page shows. bases: accuracy of the untrained model by pool."""
    return {"seeds": args.seeds, "side": args.side, "prompts": args.prompts, "sampled": [PROMPTS, SAMPLES],
            "pictured": [PICTURED, study_measures.probe.SAMPLES], "fives": SIDES["train"][1], "known": MASTERED,
            "bases": bases, "rows": judged(rows)}


def commit() -> str:
    """Return the last commit that changed the package, empty outside of a repository."""
    command = ["git", "log", "-1", "--format=%h", "--", "flowgrpo"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def result(row: Row, without: list[dict[str, Any]], having: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the comparison of a row's finished runs, one per seed and arm."""
    scores = [np.array([run[row.quantity] for run in side], dtype=float) for side in (without, having)]
    spent = [sum(run["evaluations"] for run in side) for side in (having, without)]
    accuracy = [float(np.mean([run["accuracy"] for run in side])) for side in (without, having)]
    return {"name": row.name, "setting": row.setting, "claim": row.claim, "quantity": row.quantity,
            "pool": POOLS[row.pool], **compared(*scores), "accuracy": accuracy, "evaluations": spent[0] / spent[1],
            "commits": sorted({run["commit"] for run in without + having})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/study"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--side", choices=("held_out", "validation"), default="held_out")
    parser.add_argument("--prompts", type=int, default=300, help="measured prompts")
    parser.add_argument("--only", action="append", choices=sorted({row.name for row in ROWS + CANDIDATES}),
                        help="a part; may be repeated")
    parser.add_argument("--pool", action="append", choices=POOLS, help="prompts; may be repeated")
    parser.add_argument("--new", action="store_true", help="rows that docs/data/studies.json lacks")
    args = parser.parse_args()
    silence()
    torch.set_num_threads(1)
    write_prompts(args.output / "prompts")
    study(args)


if __name__ == "__main__":
    main()
