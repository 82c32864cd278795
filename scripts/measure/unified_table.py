"""Tables of the unified starter: both halves, each half alone, and its own answers as the reward beside the reader's.

    python scripts/measure/unified_table.py --output runs/unified          # three seeds of every arm of the first table
    python scripts/measure/unified_table.py --output runs/unified --table rewards --seeds 0
    python scripts/measure/unified_table.py --output runs/unified --only both --seeds 0 1

Every row is one run of configs/starter_unified.yaml: the strict accuracy `scene` of images of held-out prompts, the
share of right answers to balanced questions about rendered held-out scenes, the same with the images hidden, and the
imbalance, each before and after. Prints the rows as they come, then the table in Markdown, with the processor seconds
of each run; writes `table.json`, and reads the rows that are there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from flowgrpo.config import load
from flowgrpo.run import run

sys.path.append(str(Path(__file__).parents[1] / "docs"))
from revisions import commit  # noqa: E402 -- a script of the folder beside

RECIPE = Path(__file__).parents[2] / "configs" / "starter_unified.yaml"
OWN: dict[str, Any] = {"reward": {"self_answers": {"args": {"length": 3}}}, "eval.rewards": ["scene"],
                       "parts.kl.weight": 0.01, "parts.advantage.scale": "none"}
PROMPTS: dict[str, Any] = {"parts.data.reader": "prompt"}  # what every image is said to show
BARE: dict[str, Any] = {"parts.kl.weight": 0.0, "parts.advantage.scale": "group"}
ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "halves": {
        "both": {},
        "images alone": {"parts.data.batch": 1000},  # more than are ever kept, so that no step is made
        "answers alone": {"parts.data.apart": False, "parts.data.balance": {"rl": 0.0, "data": 1.0}},
    },
    "rewards": {
        "scene; answers by the reader": {},
        "scene and own answers; by the reader": {"reward": {"scene": 1.0, **OWN["reward"]}},
        "own answers; by the reader": OWN,
        "own answers; by the prompt": OWN | PROMPTS,
        "own answers; by the prompt, no KL, divided by the std": OWN | PROMPTS | BARE,
    }}
NUMBERS = ("images", "right", "hidden", "imbalance")


def result(summary: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return each number before and after a run, from its summary."""
    told = re.findall(r"(right|hidden|imbalance) ([0-9.]+)", summary["kept"] or "")
    found = {name: [float(value) for other, value in told if other == name] for name in NUMBERS[1:]}
    found["images"] = [summary[side]["scene"] for side in ("before", "after")]
    return {name: (found[name][0], found[name][-1]) for name in NUMBERS if found[name]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--table", choices=ARMS, default="halves")
    parser.add_argument("--only", nargs="*", help="arms")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="override of the recipe")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "table.json"
    rows: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    given = dict(option.partition("=")[::2] for option in args.option)
    for arm, changes in ARMS[args.table].items():
        for seed in args.seeds if args.only is None or arm in args.only else ():
            key = f"{args.table}/{arm}/{seed}"
            if key not in rows:
                folder = args.output / re.sub(r"\W+", "_", key)
                began = time.process_time()
                summary = run(load(RECIPE, given | changes | {"seed": seed, "output": str(folder), "tracker": "none"}))
                rows[key] = {name: list(pair) for name, pair in result(summary).items()} | {
                    "seconds": round(time.process_time() - began), "commit": commit()}
                file.write_text(json.dumps(rows, indent=1) + "\n")
            print(key, rows[key], flush=True)
    print("| run | seed | " + " | ".join(NUMBERS) + " | processor, s |\n|" + "---|" * (len(NUMBERS) + 3))
    for key, row in rows.items():
        _, arm, seed = key.split("/")
        cells = [f"{row[name][0]:.3f} to {row[name][1]:.3f}" if name in row else "" for name in NUMBERS]
        print(f"| {arm} | {seed} | " + " | ".join(cells) + f" | {row['seconds']:.0f} |")
    print(f"commits: {', '.join(sorted({row['commit'] for row in rows.values()}))}")


if __name__ == "__main__":
    main()
