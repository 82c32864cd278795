"""Largest |log ratio| before the first update, in fp32 and bf16, of every preset that records steps, as a table.

    python scripts/measure/first_ratio.py

It has to be 0: the replay scores what the rollout drew, under the same weights. Every preset samples one micro-batch of
the recipe's prompts at several epochs, so that the windows that move are met at several places; the table has the
largest value of all rows, steps and epochs. The last column is a tenth of the preset's clip range: in bf16 a run that
finds more than that computes the old log-probabilities again as the replay does.
"""

import argparse
import math
from functools import partial

import torch
from common import RECIPE, make_trainer, options

from flowgrpo.config import load
from flowgrpo.methods import preset
from flowgrpo.methods.presets import presets_for
from flowgrpo.methods.targets import JointDensity, RecordedSteps
from flowgrpo.train import Trainer

OVER = {"grpo_guard": "mix_grpo+grpo_guard", "flow_dppo": "flow_grpo+flow_dppo", "sol_rl": "flow_grpo+sol_rl",
        "texforce": "ddpo+texforce"}
# Those that change which prompts are drawn have the ratios of their base methods; expo trains no denoiser.
ELSEWHERE = {"dynamic_sampling", "mopps", "knapsack_rl", "scaf_grpo", "ghpo", "expo"}
METHODS = [OVER.get(name, name) for name in presets_for("flow")
           if isinstance(preset(name).target, (RecordedSteps, JointDensity)) and name not in ELSEWHERE]
PRECISIONS = ("fp32", "bf16")


def largest(trainer: Trainer, epochs: list[int]) -> float:
    """Largest first |log ratio| over the epochs, with the trainer's weights as they are."""
    shape, found = trainer.geometry, []
    batch = trainer.prompts[:: max(1, len(trainer.prompts) // shape.prompts)][:shape.prompts]
    conditioning = trainer.rollouts.conditioning(batch)
    for epoch in epochs:
        sampled = trainer.rollouts.sample(conditioning, epoch, partial(trainer.scoring.total, batch))
        parts = [part for part, _ in sampled]
        trainer.first_ratio.max_log_ratio = None
        trainer.first_ratio(parts, conditioning, print)
        found.append(trainer.first_ratio.max_log_ratio)
    return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--epochs", type=int, nargs="+", default=[0, 50])
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="override of the recipe")
    args = parser.parse_args()
    print("| method | " + " | ".join(PRECISIONS) + " | a tenth of the clip range |")
    print("|---|" + "---:|" * (len(PRECISIONS) + 1))
    for method in args.methods:
        cells = []
        for precision in PRECISIONS:
            overrides = {"train.prompts": "2", "train.group": "16", "train.steps": "11", "method": method,
                         "precision": precision, "parts": "{}"}
            trainer = make_trainer(load(RECIPE, overrides | options(args.option)))
            cells.append(f"{largest(trainer, args.epochs):.1e}")
        clip = trainer.method.loss.surrogate
        narrow = min(clip.low, clip.high)
        limit = f"{narrow / 10:.0e}" if narrow < math.inf else "no clip"
        print(f"| {method} | " + " | ".join(cells) + f" | {limit} |", flush=True)


if __name__ == "__main__":
    with torch.random.fork_rng():
        torch.manual_seed(0)
        main()
