"""Tables of the unified starter: both halves, each half alone, and its own answers as the reward beside the reader's.

    python scripts/measure/unified_table.py --output runs/unified          # three seeds of every arm of the first table
    python scripts/measure/unified_table.py --output runs/unified --table rewards --seeds 0
    python scripts/measure/unified_table.py --output runs/unified --only both --seeds 0 1

Every row is one run of configs/starter_unified.yaml. Its weights, and those it began with, draw two images of each of
the 240 held-out prompts: their strict accuracy `scene`. They answer 960 balanced questions about rendered held-out
scenes, shown and hidden: the shares of right answers. The imbalance is the difference of images and answers. Prompts,
questions and seeds of these are the same for all rows. Prints the rows as they come, then the table in Markdown, with
the processor seconds of each run, its own evaluations in them; writes `table.json`, and reads the rows that are there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowgrpo.config import load
from flowgrpo.run import run
from flowgrpo.starter import FOLDERS

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("docs", "build")]
from build_starter_unified import answers_right, held_out_prompts, images_right  # noqa: E402 -- of a folder beside
from revisions import commit  # noqa: E402

RECIPE = Path(__file__).parents[2] / "configs" / "starter_unified.yaml"
OWN: dict[str, Any] = {"reward": {"self_answers": {"args": {"length": 3}}}, "eval.rewards": ["scene"],
                       "parts.kl.weight": 0.01, "parts.advantage.scale": "none"}
# The curriculum counts rewards as success rates, so that both together are at most 1.
HALVES: dict[str, Any] = {"reward": {"scene": 0.5, "self_answers": {"weight": 0.5, "args": {"length": 3}}}}
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
        "scene and own answers; by the reader": HALVES,
        "own answers; by the reader": OWN,
        "own answers; by the prompt": OWN | PROMPTS,
        "own answers; by the prompt, no KL, divided by the std": OWN | PROMPTS | BARE,
    }}
NUMBERS = ("images", "right", "hidden", "imbalance")


@cache
def measured(folder: Path) -> dict[str, float]:
    """Return what the weights of a folder draw and answer, and the strict accuracy of each task's images."""
    from transformers import AutoProcessor, JanusForConditionalGeneration

    model = JanusForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, prompts = AutoProcessor.from_pretrained(folder).tokenizer, 2 * held_out_prompts()
    drawn = {name: float(np.mean(found)) for name, found in images_right(model, tokenizer, prompts).items()}
    right, hidden = (float(np.mean(answers_right(model, tokenizer, prompts, blank)["all"])) for blank in (False, True))
    return {"images": drawn.pop("all"), "right": right, "hidden": hidden} | drawn


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
                config = load(RECIPE, given | changes | {"seed": seed, "output": str(folder), "tracker": "none"})
                run(config)
                seconds = round(time.process_time() - began)
                before, after = (measured(weights) for weights in (FOLDERS[config.model], *folder.glob("*/model")))
                rows[key] = {name: [before[name], after[name]] for name in before} | {
                    "seconds": seconds, "commit": commit()}
                file.write_text(json.dumps(rows, indent=1) + "\n")
            print(key, rows[key], flush=True)
    print("| run | seed | " + " | ".join(NUMBERS) + " | processor, s |\n|" + "---|" * (len(NUMBERS) + 3))
    for key, row in rows.items():
        _, arm, seed = key.split("/")
        row["imbalance"] = [abs(image - right) for image, right in zip(row["images"], row["right"])]
        cells = [f"{row[name][0]:.3f} to {row[name][1]:.3f}" for name in NUMBERS]
        print(f"| {arm} | {seed} | " + " | ".join(cells) + f" | {row['seconds']:.0f} |")
    print(f"commits: {', '.join(sorted({row['commit'] for row in rows.values()}))}")


if __name__ == "__main__":
    main()
