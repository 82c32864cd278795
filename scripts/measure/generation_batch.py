"""Completions drawn at once (`train.generation_batch`) beside one training micro-batch at a time: calls and seconds.

    python scripts/measure/generation_batch.py [--model starter_text] [--repeats 3] [--threads 1] [--precision fp32]
    python scripts/measure/generation_batch.py --model models/smollm2      # as build/train_smollm2.py --write writes it

An epoch of 8 prompts x 8 samples in micro-batches of 8, an accumulation of 8, in turns with and without. The ratios are
medians over `--repeats` seeds, of the seconds of sampling and of whole epochs; the first epoch of each is not counted.
A folder is trained as `smollm2_135m` is.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch

from flowgrpo.config import parse
from flowgrpo.tools.bench.models import MODELS, common_settings
from flowgrpo.tools.bench.probe import trainer_of

SMOLLM2 = Path(__file__).parents[2] / "configs" / "smollm2_135m.yaml"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="starter_text")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    if of := MODELS.get(given.model):
        recipe, settings = None, common_settings(given.model) | {"prompts": of.prompts, "reward": {of.measured: 1.0},
                                                                 "method": "grpo"}
    else:
        recipe, settings = SMOLLM2, {"model": given.model}
    found: dict[int | None, list[tuple[int, float, float]]] = {8: [], None: []}
    for seed in range(given.repeats):
        made = {}
        for size in found:
            made[size] = trainer_of(parse.load(recipe, settings | {
                "seed": seed, "precision": given.precision, "train.prompts": 8, "train.group": 8,
                "train.micro_batch": 8, "train.updates": 1, "train.generation_batch": size}))
        for epoch in range(2):
            for size, trainer in made.items():
                draw, calls = trainer.policy.sample, list[float]()

                def timed(*given, draw=draw, calls=calls):
                    began = time.perf_counter()
                    drawn = draw(*given)
                    calls.append(time.perf_counter() - began)
                    return drawn
                trainer.policy.sample, trainer.epoch, start = timed, epoch, time.perf_counter()
                trainer.run_epoch()
                trainer.policy.sample = draw
                if epoch:
                    found[size].append((len(calls), sum(calls), time.perf_counter() - start))
    for size, rows in found.items():
        print(f"{size or 'all'} at once: {rows[0][0]} calls an epoch, "
              f"{median(row[1] for row in rows):.3g} s of sampling, {median(row[2] for row in rows):.3g} s an epoch")
    for place, what in ((1, "sampling"), (2, "epoch")):
        ratios = [one[place] / all_[place] for one, all_ in zip(found[8], found[None])]
        print(f"{what}: {median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
