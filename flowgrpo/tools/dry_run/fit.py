"""Settings with which a recipe fits a GPU, by dry runs."""

import bisect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from flowgrpo.config import features
from flowgrpo.config.geometry import geometry
from flowgrpo.config.schema import Config
from flowgrpo.device import AUTO
from flowgrpo.errors import UserError
from flowgrpo.gpus import GPU, GPUS
from flowgrpo.policies.build import IMAGE_TOKENS, kind
from flowgrpo.tools.dry_run import profiles
from flowgrpo.tools.dry_run.estimate import ANSWERS, Estimate, dry_run

# Options in the order of docs/performance.md, cheapest first: what they are changed from, and the phases they help.
# Those of features come before them.
LOOP = frozenset(("preview", "rollout", "decode", "base", "rescore", "update", ANSWERS))
LATER = LOOP | {"reward"}
OPTIONS: list[tuple[str, Any, Any, frozenset[str]]] = [
    ("memory.rewards", "keep", "cpu", frozenset(("encode", "update"))),
    ("memory.encoders", "keep", "cpu", LATER),
    ("memory.vae", "whole", "sliced", frozenset(("decode", "preview", "base"))),
    ("train.checkpointing", False, True, frozenset(("update", ANSWERS))),
    ("train.micro_batch", None, None, LOOP),
    ("memory.states", "device", "cpu", LATER),
    ("memory.weights", "full", "int8", LATER | {"encode"}),
    ("memory.vae", "sliced", "tiled", frozenset(("decode", "preview", "base"))),
    ("memory.weights", "int8", "nf4", LATER | {"encode"}),
    ("memory.encoders", "cpu", "ahead", frozenset(("encode",))),
]


def epoch(config: Config, gpu: GPU, processes: int = 1) -> Estimate:
    """Counts of an epoch: of a pipeline, or of a model of image tokens. Those known already are read."""
    if of_tokens := kind(config) == IMAGE_TOKENS:
        from flowgrpo.tools.dry_run.tokens import dry_run as run
    else:
        run = dry_run
    return profiles.find(config, gpu, processes, lambda on: run(config, on, processes), of_tokens)


def nearest_settings(config: Config, gpu: GPU, estimate: Estimate, processes: int = 1
                     ) -> tuple[dict[str, Any], Estimate]:
    """Changes of a recipe that make it fit, as {"memory.vae": "sliced"}, and its estimate with them, which shows if
    nothing fits. estimate: of the recipe as it is.

    Options that help a phase that does not fit are tried in the documented order, cheapest first, until the recipe
    fits. Then those that are not needed are taken back.
    """
    settings: dict[str, Any] = {}
    refused: set[tuple[str, Any]] = set()
    while above := estimate.above(gpu.room):
        option = next((option for option in _options(config.having(settings), above)
                       if option not in refused and (option[0] != "memory.rewards" or estimate.rewards)), None)
        if option is None:
            return settings, estimate
        try:
            trial = settings | dict([option])
            estimate, settings = epoch(config.having(trial), gpu, processes), trial
        except UserError:  # an autoencoder without slices, a micro-batch that does not divide
            refused.add(option)
    for name in list(settings)[:-1]:
        without = {key: value for key, value in settings.items() if key != name}
        trial_estimate = epoch(config.having(without), gpu, processes)
        if not trial_estimate.above(gpu.room):
            estimate, settings = trial_estimate, without
    return settings, estimate


def _options(config: Config, above: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options that are not taken yet and help one of these phases."""
    of_language = config.text.generates == "image"  # whose weights stay whole, and on the device
    rare = [(*option, LATER) for feature in features.dry_runs(features.all()) for option in feature.options]
    for name, old, new, helped in (*rare, *OPTIONS):
        section, key = name.split(".")
        value = getattr(getattr(config, section), key)
        if helped.isdisjoint(above) or of_language and section != "train":
            continue
        if name == "train.micro_batch":
            smaller = (rows for rows in range(value // 2, 0, -1) if config.train.group % rows == 0)
            yield from ((name, rows) for rows in list(smaller)[:1])
        elif value == old or name == "train.checkpointing" and value < new:  # a share of the blocks
            yield name, new


def batch_settings(config: Config, room: float, processes: int = 1, micro_batches: Sequence[int] = (),
                   checkpointing: Sequence[bool] = (False, True)) -> dict[str, Any] | None:
    """Micro-batch and checkpointing of the fastest epoch that fits `room` bytes, as {"micro_batch": 8, "checkpointing":
    False}: of each setting of checkpointing the largest micro-batch that fits, and of these the one with fewer seconds.
    None if nothing fits.

    config: its micro_batch and checkpointing are not read. room: as `GPU.room`. micro_batches, checkpointing: those to
    choose from; without micro_batches the divisors of the group, and whole groups that divide the prompts. A dry run
    takes seconds to half a minute, and there are about four for each setting of checkpointing. UserError for what a dry
    run does not cover.
    """
    sizes = sorted(micro_batches)
    if not sizes:
        group, prompts = config.train.group, config.train.prompts // processes
        parts = [size for size in range(1, group) if group % size == 0]
        wholes = [group * count for count in range(1, prompts + 1) if prompts % count == 0]
        for size in [*parts, *wholes]:
            with suppress(UserError):  # of a size that the optimizer steps do not go with
                geometry(config.having({"train.micro_batch": size}).train, processes)
                sizes.append(size)
    best: list[tuple[float, int, bool]] = []
    for setting in checkpointing:
        estimates: dict[int, Estimate] = {}

        def above(size: int) -> bool:
            options = {"train.micro_batch": size, "train.checkpointing": setting}
            estimates[size] = epoch(config.having(options), GPUS["H100"], processes)
            return bool(estimates[size].above(room))

        fitting = bisect.bisect_left(sizes, True, key=above)
        if fitting:
            best.append((estimates[sizes[fitting - 1]].seconds, sizes[fitting - 1], setting))
    return None if not best else {"micro_batch": min(best)[1], "checkpointing": min(best)[2]}


def settle(config: Config, gpu: GPU, processes: int = 1) -> Config:
    """Recipe with values in place of `auto`: those that fit the GPU, or else that take the least memory."""
    train = config.train
    if AUTO in (train.micro_batch, train.checkpointing):
        sizes = () if train.micro_batch == AUTO else (train.rows,)
        shares = (False, True) if train.checkpointing == AUTO else (bool(train.checkpointing),)
        chosen = batch_settings(config, gpu.room, processes, sizes, shares)
        least = {"micro_batch": min(sizes, default=1), "checkpointing": shares[-1]}
        config = config.having({f"train.{key}": value for key, value in (chosen or least).items()})
    for feature in features.dry_runs(features.all()):
        config = feature.resolve_auto(config, processes, lambda held: not epoch(held, gpu, processes).above(gpu.room))
    return config
