"""Readings of optimizer steps at several times their size, in fp32 and bf16, by the signals of `train.lr: auto`.

    python scripts/measure/step_readings.py --file docs/data/step_readings.json  # minutes of one core

Each starter trains four updates at its recipe's learning rate. After each update the trained weights are set to those
before it and a multiple of the change, and the signal is read. The file has a row per starter, precision and update:
the multiples and their signals. A signal that is linear has the same quotient at all of them.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from common import make_trainer
from tune_rates import commit

from flowgrpo.config import load
from flowgrpo.contrib.step_size.extension import COMPLETIONS, STATES
from flowgrpo.contrib.step_size.signals import Tokens, Velocity
from flowgrpo.storage import atomic
from flowgrpo.train import Trainer
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension

CONFIGS = Path(__file__).parents[2] / "configs"
UPDATES, FACTORS = 4, (0.001, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32)
STARTERS = {"starter": ("image", {"train.group": 16, "train.micro_batch": 64}),
            "starter_video": ("video", {"train.micro_batch": 64}),
            "starter_text": ("text", {"train.prompts": 16, "train.micro_batch": 64})}


class Readings(Extension):
    """Signals of the steps of an epoch, of these multiples of each step."""

    def __init__(self, trainer: Trainer):
        super().__init__(trainer)
        self.rows: list[list[float]] = []
        self.signal: Velocity | Tokens | None = None
        self.before: dict[str, torch.Tensor] = {}

    def on_credited(self, epoch: Epoch) -> None:
        """Choose the decisions that are read."""
        kind, count = (Tokens, COMPLETIONS) if self.trainer.policy.modality == "text" else (Velocity, STATES)
        self.signal = kind(self.trainer, epoch.parts, epoch.conditioning, count)

    def on_gradients(self, update: int) -> None:
        """Keep the weights before a step."""
        self.before = {key: weight.detach().clone() for key, weight in self.trainer.policy.weights.named.items()}

    @torch.no_grad()
    def on_stepped(self) -> None:
        """Read the multiples of a step, and leave it as it was."""
        named, signal, found = self.trainer.policy.weights.named, self.signal, list[float]()
        assert signal is not None
        after = {key: weight.detach().clone() for key, weight in named.items()}
        for factor in (0, *FACTORS):
            for key, weight in named.items():
                weight.copy_(torch.lerp(self.before[key], after[key], factor))
            if factor == 0:
                start = signal.read()
            else:
                found.append(signal.size(*signal.sums(start, signal.read())))
        for key, weight in named.items():
            weight.copy_(after[key])
        self.rows.append(found)


def readings(recipe: str, options: dict[str, Any], precision: str, seed: int) -> list[list[float]]:
    """Return the signals of the first updates of a recipe: one list per update, a signal per factor."""
    overrides = options | {"precision": precision, "seed": seed, "device": "cpu", "train.warmup": 0}
    torch.manual_seed(seed)
    trainer = make_trainer(load(CONFIGS / f"{recipe}.yaml", {key: str(value) for key, value in overrides.items()}))
    own = Readings(trainer)
    trainer.extensions.present.append(own)
    while len(own.rows) < UPDATES:
        trainer.run_epoch()
    return own.rows[:UPDATES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = []
    for recipe, (label, options) in STARTERS.items():
        for precision in ("fp32", "bf16"):
            for update, signals in enumerate(readings(recipe, options, precision, args.seed)):
                rows.append({"starter": label, "precision": precision, "seed": args.seed, "update": update + 1,
                             "commit": commit(), "factors": FACTORS, "signals": [float(f"{x:.4g}") for x in signals]})
                print(json.dumps(rows[-1]), flush=True)
    atomic.write_text(args.file, "[" + ",\n".join(map(json.dumps, rows)) + "]\n")


if __name__ == "__main__":
    main()
