"""Table of learning rates: runs from several starting rates, fixed with a warm-up and found by `train.lr: auto`, for
methods on the starters.

    python scripts/measure/tune_rates.py --file rates.json                # all set-ups, eight rates, three seeds: hours
    python scripts/measure/tune_rates.py --file rates.json --setups text --rates 1e-6 1 --seeds 0 --kinds auto
    python scripts/measure/tune_rates.py --file rates.json --table        # print what is there

A run that is in the file already is left out, so that the command goes on where it was stopped. The file has of every
run its settings and commit, the held-out rewards before and after, and the rate that was found. Fixed rates have a
warm-up of 8 updates. A run that is refused says so in its row. A summary follows: per method, the best fixed rate, the
auto runs beside it, and the runs that collapsed.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "docs"))

from revisions import commit  # noqa: E402

from flowgrpo.storage import atomic  # noqa: E402

ROOT = Path(__file__).parents[2]
KINDS, WARMUP = ("auto", "fixed"), 8
CLOSE = 0.03  # of a held-out reward
RATES = [10**(power / 4 * 2.5 - 5) for power in range(8)]  # eight over more than four decades, from 1e-5
IMAGE = {"train.epochs": 24, "train.group": 16, "train.micro_batch": 64, "eval.prompts": 240}
# Recipe, reward that is compared, options, and methods; the first method of a set-up is its recipe's.
SETUPS: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "image": ("starter", "scene", IMAGE, ["mix_grpo+grpo_guard+texforce"]),
    "methods": ("starter", "scene", IMAGE | {"parts": "{}"},
                ["flow_grpo+texforce", "diffusion_nft+texforce", "awm+texforce"]),
    "consistency": ("starter_consistency", "scene", {"train.epochs": 32}, ["rlcm"]),
    "video": ("starter_video", "motion", {"train.epochs": 60}, ["mix_grpo"]),
    "text": ("starter_text", "numeric_match", {"train.epochs": 16, "train.prompts": 16, "train.micro_batch": 64,
                                               "eval.prompts": 200}, ["grpo", "dapo"])}


def runs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Settings of all runs that are asked for."""
    found = []
    for setup, precision, kind, rate, seed in itertools.product(args.setups, args.precisions, args.kinds, args.rates,
                                                                args.seeds):
        for method in SETUPS[setup][3]:
            if not args.methods or method in args.methods:
                found.append({"setup": setup, "method": method, "precision": precision, "kind": kind, "rate": rate,
                              "seed": seed, "options": options(setup, kind, rate) | dict(args.option)})
    return found


def options(setup: str, kind: str, rate: float) -> dict[str, str]:
    """Overrides of the set-up's recipe."""
    own = {"train.lr": f"{{start: {rate!r}}}", "train.warmup": 0} if kind == "auto" else \
        {"train.lr": rate, "train.warmup": WARMUP}
    return {key: str(value) for key, value in (SETUPS[setup][2] | own).items()}


def outcome(run: dict[str, Any]) -> dict[str, Any]:
    """Train, and return what came of it."""
    recipe, reward, _, _ = SETUPS[run["setup"]]
    with tempfile.TemporaryDirectory() as folder:
        given = {"method": run["method"], "precision": run["precision"], "seed": run["seed"], "output": folder,
                 "name": "run", "tracker": "none", "device": "cpu"} | run["options"]
        command = [sys.executable, "-m", "flowgrpo", "train", str(ROOT / "configs" / f"{recipe}.yaml"),
                   *(f"--{key}={value}" for key, value in given.items())]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[-1]}
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [{name: line[f"step_size/{name}"] for name in ("rate", "moved", "floor")} for line in lines
                if "step_size/moved" in line]
    found = {"rate_found": lines[-1]["step_size/rate"], "calibration": measured} if measured else {}
    return {"before": summary["before"][reward], "after": summary["after"][reward], "seconds": summary["seconds"],
            "rewards": [line[f"reward/{reward}/mean"] for line in lines]} | found


def label(run: dict[str, Any]) -> str:
    """What tells a run from all others."""
    return json.dumps([run[name] for name in ("setup", "method", "precision", "kind", "rate", "seed", "options")])


def table(results: list[dict[str, Any]]) -> str:
    """Markdown of the results: a row per set-up and starting rate, means over seeds."""
    rows: dict[tuple, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: {kind: [] for kind in KINDS})
    for run in results:
        rows[run["setup"], run["method"], run["precision"], run["rate"]][run["kind"]].append(run)
    lines = ["| set-up | method | precision | start | auto | rates found | fixed | seeds |",
             "|---|---|---|---:|---:|---:|---:|---|"]
    for (setup, method, precision, rate), kinds in sorted(rows.items()):
        found = ", ".join(f"{run['rate_found']:.2g}" for run in kinds["auto"] if run.get("rate_found"))
        seeds = sorted({run["seed"] for group in kinds.values() for run in group})
        cells = [setup, method, precision, f"{rate:.2g}", ended(kinds["auto"]), found or "-", ended(kinds["fixed"]),
                 ", ".join(map(str, seeds))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ended(runs: list[dict[str, Any]]) -> str:
    """Return the mean held-out reward behind runs; of none `-`, and of refused ones what they say."""
    whole = [run["after"] for run in runs if "error" not in run]
    return f"{mean(whole):.3f}" if whole else runs[0]["error"] if runs else "-"


def summary(results: list[dict[str, Any]]) -> str:
    """Markdown of the results: a row per set-up, method and precision, auto runs beside the best fixed rate.

    The best fixed rate is that with the best mean over its seeds. A start is compared with it on the seeds that both
    have, a run on its own seed. A run collapsed if its held-out reward ends more than CLOSE below its start.
    """
    groups: dict[tuple, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: {kind: [] for kind in KINDS})
    for run in results:
        if "error" not in run:
            groups[run["setup"], run["method"], run["precision"]][run["kind"]].append(run)
    lines = [f"| set-up | method | precision | before | best fixed rate | it ends at | auto ends at | worst start | "
             f"within {CLOSE:g} | rates found | auto collapsed | fixed collapsed |", "|---|---|---|" + "---:|" * 9]
    for key, kinds in sorted(groups.items()):
        if all(kinds.values()):
            lines.append("| " + " | ".join([*key, *compared(kinds["auto"], kinds["fixed"])]) + " |")
    return "\n".join(lines)


def compared(auto: list[dict[str, Any]], fixed: list[dict[str, Any]]) -> list[str]:
    """Return the cells of a row of `summary` after its names."""
    best = max({run["rate"] for run in fixed}, key=lambda rate: end(fixed, rate))
    apart = [end(auto, rate, seeds) - end(fixed, best, seeds) for rate in sorted({run["rate"] for run in auto})
             if (seeds := seeds_of(auto, rate) & seeds_of(fixed, best))]
    found = [run["rate_found"] for run in auto]
    paired = [run["after"] - end(fixed, best, {run["seed"]}) for run in auto if run["seed"] in seeds_of(fixed, best)]
    close = sum(each >= -CLOSE for each in paired)
    lost = [f"{sum(run['after'] < run['before'] - CLOSE for run in runs)} of {len(runs)}" for runs in (auto, fixed)]
    return [f"{mean(run['before'] for run in auto):.3f}", f"{best:.2g}", f"{end(fixed, best):.3f}",
            f"{mean(run['after'] for run in auto):.3f}", f"{min(apart):+.3f}", f"{close} of {len(paired)}",
            f"{min(found):.2g} to {max(found):.2g}", *lost]


def end(runs: list[dict[str, Any]], rate: float, seeds: Collection[int] = ()) -> float:
    """Return the mean held-out reward behind runs of a rate, of all seeds or these."""
    return mean(run["after"] for run in runs if run["rate"] == rate and (not seeds or run["seed"] in seeds))


def seeds_of(runs: list[dict[str, Any]], rate: float) -> set[int]:
    """Return the seeds of the runs of a rate."""
    return {run["seed"] for run in runs if run["rate"] == rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--setups", nargs="+", default=[*SETUPS], choices=[*SETUPS])
    parser.add_argument("--methods", nargs="+", default=[])
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=KINDS)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE",
                        type=lambda text: tuple(text.partition("=")[::2]), help="override of every run")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    args = parser.parse_args()
    results = json.loads(args.file.read_text()) if args.file.exists() else []
    if not args.table:
        known = {label(run) for run in results}
        for run in runs(args):
            if label(run) in known:
                continue
            made = outcome(run)
            short = json.loads(json.dumps(made), parse_float=lambda text: float(f"{float(text):.4g}"))
            results.append(run | {"commit": commit()} | short)
            atomic.write_text(args.file, "[" + ",\n".join(map(json.dumps, results)) + "]\n")
            print(run["setup"], run["method"], run["precision"], run["kind"], f"{run['rate']:.2g}", run["seed"],
                  made.get("error") or f"{made['before']:.3f} to {made['after']:.3f}", made.get("rate_found", ""),
                  flush=True)
    print(table(results), summary(results), sep="\n\n")


if __name__ == "__main__":
    main()
