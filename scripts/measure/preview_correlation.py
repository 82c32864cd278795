"""Ranking of initial noises by a cheap preview: its scores against those of the full run, as a markdown table.

    python scripts/measure/preview_correlation.py --prompts 24 --pool 24 --seeds 0 1 2

Every prompt's pool of noises is run deterministically on the whole grid in full precision, and again from the same
noises with fewer steps and in low precision (torchao). Per prompt, Spearman's and Kendall's rank correlation of the two
lists of scores (scipy); the table has the mean over prompts and seeds. Beside it stands how many of the --keep noises
that a preview would choose, half of them the best and half the worst, the full run would choose too. The scores are
those of the recipe's rewards, their weighted sum. A prompt whose images all score the same has no ranks and does not
count; how many do is in the first line.
"""

import argparse
from functools import partial
from statistics import mean

import torch
from common import RECIPE, make_trainer, options
from scipy.stats import kendalltau, spearmanr

from flowgrpo.config import load
from flowgrpo.evaluation.measured import spread
from flowgrpo.policies.weights.low_precision import with_quantised_weights
from flowgrpo.samplers.grids import make_grid
from flowgrpo.samplers.preview import PRECISIONS, contrasting, previews
from flowgrpo.samplers.rollout import seeder
from flowgrpo.train import Trainer


def scores(trainer: Trainer, prompts: list, pool: int, steps: int, precision: str, seed: int) -> torch.Tensor:
    """Weighted rewards of every noise of the pool, [prompts, pool]."""
    config, policy = trainer.config, trainer.policy
    conditioning = policy.encode([prompt.text for prompt in prompts])
    grid = make_grid(config.train.grid, steps, config.train.shift, policy.stock, policy.strength,
                     partial(policy.stock_grid, conditioning))
    with with_quantised_weights(policy, precision):
        finals = previews(policy, conditioning, *grid, pool, trainer.geometry.micro_batch, seeder(seed, 0))
    rows = torch.arange(len(prompts)).repeat_interleave(pool)
    found = trainer.scoring.score(prompts, rows, trainer.rollouts.decode(finals, conditioning.rows(rows)), pool)
    weights = [getattr(weight, "weight", weight) for weight in config.rewards.values()]
    return (found * torch.tensor(weights)).nansum(1).view(-1, pool)


def agreement(low: torch.Tensor, full: torch.Tensor, keep: int) -> list[tuple[float, float, float]]:
    """(Spearman, Kendall, share of `keep` chosen noises in common) of every row [pool] that has ranks in both."""
    found = []
    for a, b in zip(low, full):
        if a.std() > 0 and b.std() > 0:
            chosen = [set(contrasting(each[None], keep)[0].tolist()) for each in (a, b)]
            found.append((spearmanr(a, b).statistic, kendalltau(a, b).statistic, len(chosen[0] & chosen[1]) / keep))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24, help="prompts, evenly over those that are trained on")
    parser.add_argument("--pool", type=int, default=24, help="noises per prompt")
    parser.add_argument("--keep", type=int, default=12, help="of them are chosen")
    parser.add_argument("--steps", type=int, nargs="+", default=[2, 4, 6, 10])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["full", "auto"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="override of the recipe")
    args = parser.parse_args()
    config = load(RECIPE, {"method": "flow_grpo", "parts": "{}", "tracker": "none"} | options(args.option))
    trainer, whole = make_trainer(config), config.train.steps
    prompts = spread(trainer.prompts, args.prompts)
    full = {seed: scores(trainer, prompts, args.pool, whole, "full", seed) for seed in args.seeds}
    ranked = sum(int((found.std(1) > 0).sum()) for found in full.values())
    print(f"Against {whole} steps in full precision: {len(prompts)} prompts, {args.pool} noises each, seeds "
          f"{', '.join(map(str, args.seeds))}; {ranked} of {len(prompts) * len(args.seeds)} pools have ranks.\n")
    print(f"| steps | precision | Spearman | Kendall | chosen alike, {args.keep} of {args.pool} |")
    print("|---:|---|---:|---:|---:|")
    for steps in args.steps:
        for precision in args.precisions:
            if (steps, precision) == (whole, "full"):
                continue
            found = [each for seed in args.seeds for each in agreement(
                scores(trainer, prompts, args.pool, steps, precision, seed), full[seed], args.keep)]
            cells = [f"{mean(column):.3f}" for column in zip(*found)] or ["-"] * 3
            print(f"| {steps} | {precision} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
