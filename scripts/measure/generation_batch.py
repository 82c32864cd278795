"""Seconds of sampling completions, and of a whole epoch: this checkout beside another one, such as of an older commit.

    git worktree add OLD fdbc0b0d
    python scripts/measure/generation_batch.py OLD [--model starter_text] [--repeats 5] [--threads 1]
    python scripts/measure/generation_batch.py OLD --model models/smollm2  # as build/train_smollm2.py --write writes it

An epoch of 8 prompts x 8 samples in micro-batches of 8, an accumulation of 8. Each repetition, with a seed of its own,
is a process of either checkout, in turns; the first of its three epochs is not counted, of the others the faster one
is. A folder is trained as `smollm2_135m` is. Both draw with the same seeds. Ratios are medians over the repetitions.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]


def epochs(model: str, seed: int, threads: int, precision: str) -> list[tuple[int, float, float]]:
    """(calls of the sampler, seconds of them, seconds in all) of the epochs behind the first."""
    import torch

    from flowgrpo.config import parse
    from flowgrpo.tools.bench.models import MODELS, common_settings
    from flowgrpo.tools.bench.probe import trainer_of

    torch.set_num_threads(threads)
    if of := MODELS.get(model):
        recipe, settings = None, common_settings(model) | {"prompts": of.prompts, "reward": {of.measured: 1.0},
                                                           "method": "grpo"}
    else:
        recipe, settings = ROOT / "configs" / "smollm2_135m.yaml", {"model": model}
    trainer = trainer_of(parse.load(recipe, settings | {
        "seed": seed, "precision": precision, "train.prompts": 8, "train.group": 8, "train.micro_batch": 8,
        "train.updates": 1}))
    draw, calls, found = trainer.policy.sample, list[float](), []

    def timed(*given):
        began = time.perf_counter()
        drawn = draw(*given)
        calls.append(time.perf_counter() - began)
        return drawn
    trainer.policy.sample = timed
    for epoch in range(3):
        calls.clear()
        trainer.epoch, began = epoch, time.perf_counter()
        trainer.run_epoch()
        found.append((len(calls), sum(calls), time.perf_counter() - began))
    return found[1:]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("other", help="the other checkout")
    arguments.add_argument("--model", default="starter_text")
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    arguments.add_argument("--seed", type=int, help=argparse.SUPPRESS)  # of a child: the epochs' seconds alone
    given = arguments.parse_args()
    if given.seed is not None:
        print(json.dumps(epochs(given.model, given.seed, given.threads, given.precision)))
        return
    found: dict[str, list[list[float]]] = {given.other: [], str(ROOT): []}
    for seed in range(given.repeats):
        for checkout, rows in found.items():
            told = subprocess.run([sys.executable, __file__, *sys.argv[1:], f"--seed={seed}"], check=True,
                                  stdout=subprocess.PIPE, cwd=ROOT, env=os.environ | {"PYTHONPATH": checkout}).stdout
            rows.append([min(values) for values in zip(*json.loads(told.splitlines()[-1]))])
    for checkout, rows in found.items():
        calls, sampling, whole = (median(values) for values in zip(*rows))
        print(f"{checkout}: {calls:.0f} calls an epoch, {sampling:.3g} s of sampling, {whole:.3g} s an epoch")
    for place, what in ((1, "sampling"), (2, "epoch")):
        ratios = [one[place] / other[place] for one, other in zip(*found.values())]
        print(f"{what}: {median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
