"""Gain, cost and side effects of the demo, over seeds and precisions.

    python scripts/measure/demo_table.py --output runs/demo_table         # configs/starter.yaml: 3 seeds, bf16 and fp32
    python scripts/measure/demo_table.py --output runs/demo2 --recipe configs/starter_consistency.yaml --precision fp32
    python scripts/measure/demo_table.py --output runs/auto --option train.lr=auto

A row per run: strict accuracy on held-out prompts before and after, per task after, KL to the base and diversity
within a prompt as `flowgrpo compare methods` measures them, the eval-only reward, and the whole run's seconds. Finished
runs in --output are kept. The table goes to --output/table.md, the numbers to table.json.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from flowgrpo.tools.bench import probe

TRAINED = "scene"
EVAL_ONLY = "scene_style"


def run(recipe: Path, folder: Path, seed: int, precision: str, options: list[str]) -> dict[str, Any]:
    """Summary of the run in `folder`, which is trained first unless it is finished, with its probe.

    options: overrides of the recipe, KEY=VALUE.
    """
    if not (folder / "summary.json").exists():
        subprocess.run([sys.executable, "-m", "flowgrpo", "train", str(recipe), f"--seed={seed}",
                        f"--precision={precision}", f"--eval.rewards=[{EVAL_ONLY}]", f"--output={folder.parent}",
                        f"--name={folder.name}", *(f"--{option}" for option in options)], check=True)
    summary = json.loads((folder / "summary.json").read_text())
    if not (folder / "probe.json").exists():
        (folder / "probe.json").write_text(json.dumps(probe.final_measures(folder)))
    return summary | {"precision": precision, "probe": json.loads((folder / "probe.json").read_text())}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of the summaries."""
    tasks = list(rows[0]["tasks"][TRAINED]["after"])
    heads = ["precision", "seed", "before", "after", "gain", *tasks, "KL", "diversity", EVAL_ONLY, "evaluations",
             "seconds"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in rows:
        before, after, told = row["before"], row["after"], row["probe"]
        kept = told["diversity"]["tuned"] / told["diversity"]["base"]
        cells = [row["precision"], str(row["seed"]), f"{before[TRAINED]:.3f}", f"{after[TRAINED]:.3f}",
                 f"{after[TRAINED] - before[TRAINED]:+.3f}",
                 *(f"{row['tasks'][TRAINED]['before'][task]:.2f} > {row['tasks'][TRAINED]['after'][task]:.2f}"
                   for task in tasks),
                 "-" if told["kl"] is None else f"{told['kl']:.2g}", f"{kept:.2f}",
                 f"{before[EVAL_ONLY]:.4f} > {after[EVAL_ONLY]:.4f}", f"{row['denoiser_evaluations']:,}",
                 f"{row['total_seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("configs/starter.yaml"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--precision", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--output", type=Path, default=Path("runs/demo_table"))
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="override of every run")
    args = parser.parse_args()
    rows = [run(args.recipe, args.output / f"{precision}-seed{seed}", seed, precision, args.option)
            for precision in args.precision for seed in range(args.seeds)]
    (args.output / "table.json").write_text(json.dumps(rows, indent=2) + "\n")
    (args.output / "table.md").write_text(table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
