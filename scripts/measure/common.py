"""Shared parts of the measuring scripts: a trainer without its loop, and the second half of an epoch by itself."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed
from torch import Tensor

from flowgrpo import rewards
from flowgrpo.config import Config
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import pick_device
from flowgrpo.distributed.processes import make_accelerator
from flowgrpo.policies.build import make_policy
from flowgrpo.policies.policy import resolve_precision
from flowgrpo.rewards.about import RewardFunction
from flowgrpo.samplers.rollout import Part
from flowgrpo.train import Trainer
from flowgrpo.training import credit, sampling
from flowgrpo.training.epoch import Epoch

RECIPE = Path(__file__).parents[2] / "configs" / "starter.yaml"
FIXED = {"train.lr": "1e-3"}  # of epochs that are measured: `auto` would read its own steps beside them


def make_trainer(config: Config, functions: Mapping[str, RewardFunction] | None = None) -> Trainer:
    """Trainer of a configuration, as a run has it before its first epoch; nothing is written.

    functions: rewards by name, in place of those of the configuration.
    """
    set_seed(config.seed)
    device = pick_device(config.device)
    config, _ = resolve_precision(config, device)
    return Trainer(config, make_accelerator(device), make_policy(config, device),
                   rewards.compose(config.trained, config.cache, functions), sets.resolve(config))


def epoch_of(trainer: Trainer, parts: list[Part], conditioning: Any, batch: list[Prompt], scores: Tensor) -> Epoch:
    """Epoch of the groups of a batch that are sampled and have these scores [P,G,R]."""
    epoch = Epoch(sampling.empty_batch(trainer, trainer.epoch), batch, parts, conditioning)
    epoch.groups.add(batch, scores, trainer.scoring.sum_rewards(scores))
    return epoch


def updated(trainer: Trainer, epoch: Epoch) -> dict[str, Any]:
    """Compare and train an epoch that is scored, as `Trainer.run_epoch` does; return the metrics."""
    epoch.parts = credit.compare(trainer, epoch)
    return trainer.train_on(epoch)


def measuring(said: str) -> argparse.ArgumentParser:
    """Parser of a script that measures the recipe; said: its description."""
    parser = argparse.ArgumentParser(description=said, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="override of the recipe")
    return parser


def options(given: list[str]) -> dict[str, str]:
    """KEY=VALUE from the command line as overrides of the recipe."""
    return dict(option.partition("=")[::2] for option in given)
