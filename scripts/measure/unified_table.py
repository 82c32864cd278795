"""Table of the unified starter: its own answers as the reward beside an outside checker, both tasks and each alone.

    python scripts/measure/unified_table.py --output runs/unified                     # three seeds of every arm
    python scripts/measure/unified_table.py --output runs/unified --only "own answers, images alone" --seeds 0

Every row is one run of configs/starter_unified.yaml. Its weights, and those it began with, draw two images of each of
the 240 held-out prompts: their strict accuracy `scene`. They answer 960 balanced questions about rendered held-out
scenes, shown and hidden: the shares of right answers. The imbalance is the difference of images and answers. Prompts,
questions and seeds of these are the same for all rows. Prints the rows as they come, then the table in Markdown, with
the processor seconds of each run, its own evaluations in them; writes `table.json`, and reads the rows that are there.
"""

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
CHECKER: dict[str, Any] = {"reward": {"scene": 0.5, "scene_graded": 0.5}, "parts.kl.weight": 0.0}
# Answers about the run's own right images, by the prompts.
OWN: dict[str, Any] = {"type": "SelfAnswers", "apart": True, "reader": "prompt", "questions": 1, "length": 3,
                       "source": {"type": "PassRate", "right": 1.0}}
# Balanced questions, answered by a reader of the pixels.
READER: dict[str, Any] = OWN | {"reader": "scene", "samples": 0, "batch": 192,
                                "source": {"type": "PassRate", "right": 0.0}}
ARMS: dict[str, dict[str, Any]] = {
    "own answers, images alone (the recipe)": {},
    "own answers, both tasks by GRPO": {"parts.data": OWN | {"samples": 8, "batch": 64}},
    "own answers, answers by cross entropy": {"parts.data": OWN | {"samples": 0, "batch": 192}},
    "outside checker, images alone": CHECKER,
    "outside checker and reader, both tasks": CHECKER | {"parts.data": READER},
    "outside reader, answers alone": CHECKER | {
        "parts.data": READER | {"apart": False, "balance": {"rl": 0.0, "data": 1.0}}}}
NUMBERS = ("images", "right", "hidden", "imbalance")


@cache
def measured(folder: Path) -> dict[str, float]:
    """Strict accuracy of images and of answers, shown and hidden; then of images by task and of answers by kind."""
    from transformers import AutoProcessor, JanusForConditionalGeneration

    model = JanusForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, prompts = AutoProcessor.from_pretrained(folder).tokenizer, 2 * held_out_prompts()
    drawn = {f"images/{name}": float(np.mean(found)) for name, found in images_right(model, tokenizer, prompts).items()}
    shown = {f"right/{name}": float(np.mean(found))
             for name, found in answers_right(model, tokenizer, prompts, False).items()}
    hidden = float(np.mean(answers_right(model, tokenizer, prompts, True)["all"]))
    return {"images": drawn.pop("images/all"), "right": shown.pop("right/all"), "hidden": hidden} | drawn | shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=ARMS, help="arms")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="override of the recipe")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "table.json"
    rows: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    given = dict(option.partition("=")[::2] for option in args.option)
    for arm, changes in ARMS.items():
        for seed in args.seeds if args.only is None or arm in args.only else ():
            key = f"{arm}/{seed}"
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
        arm, seed = key.split("/")
        row["imbalance"] = [abs(image - right) for image, right in zip(row["images"], row["right"])]
        cells = [f"{row[name][0]:.3f} to {row[name][1]:.3f}" for name in NUMBERS]
        print(f"| {arm} | {seed} | " + " | ".join(cells) + f" | {row['seconds']:.0f} |")
    print(f"commits: {', '.join(sorted({row['commit'] for row in rows.values()}))}")


if __name__ == "__main__":
    main()
