"""Epochs of a dry run with `train.one_pass`: counted from those of a run that replays.

The forwards of the replays are left out of the update, since its graphs are those of the rollout. These are all there
from the rollout to the update.
"""

from __future__ import annotations

from collections.abc import Callable

from flowgrpo.config.schema import Config
from flowgrpo.contrib.one_pass.extension import OnePass
from flowgrpo.device import AUTO
from flowgrpo.dry_run.meta_gpu import Phase
from flowgrpo.dry_run.repeats import Repeats
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.validate import resolve
from flowgrpo.policies import build
from flowgrpo.training import extensions

HOLDING = ("rollout", "decode", "base", "reward", "update")


def hold(phases: dict[str, Phase], calls: Repeats, times: float) -> None:
    """Change the phases of an epoch with replays into those of one without. times: the epoch over the counted calls."""
    for name in (name for name in HOLDING if name in phases):
        more = round(calls.kept * times) - calls.graph * (name == "update")  # which has one graph at a time already
        phases[name].allocated += more
        phases[name].reserved += more
    update, forwards = phases["update"], calls.forwards
    update.flops -= forwards.flops * times
    update.seconds -= forwards.seconds * times
    update.kernels -= round(forwards.kernels * times)
    update.waits.subtract({reason: round(count * times) for reason, count in forwards.waits.items()})


def require(config: Config, processes: int) -> None:
    """Raise UserError for a recipe with `train.one_pass: true` that cannot have it."""
    if config.train.one_pass is True:
        extensions.require(OnePass, _setup(config, processes))


def _setup(config: Config, processes: int) -> Setup:
    return Setup(config, build.PIPELINE, resolve(config), processes=processes)


def settle(config: Config, processes: int, fits: Callable[[Config], bool]) -> Config:
    """Return a recipe with a value in place of `auto`: true where it goes with the run and fits."""
    train = config.train
    if train.one_pass != AUTO:
        return config
    held = config.model_copy(update={"train": train.model_copy(update={"one_pass": True})})
    if not any(extensions.obstacles(OnePass, _setup(config, processes))) and fits(held):
        return held
    return config.model_copy(update={"train": train.model_copy(update={"one_pass": False})})
