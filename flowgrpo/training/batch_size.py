"""Micro-batch and checkpointing of a run that leaves them to the machine: `auto`.

They come from the memory estimate of the run's own model (training/memory.py, text/memory.py) and the memory that
its device has left. Checkpointing is the last resort, because it costs up to one more forward per update.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from flowgrpo import domains
from flowgrpo.config.geometry import geometry
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt, encodable
from flowgrpo.device import AUTO, free_memory, require_generators
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.methods.setup import Setup
from flowgrpo.policies.pipelines import encoded_prompts
from flowgrpo.policies.weights.forwards import blocks

SHARES = (0.0, 0.5, 1.0)  # of blocks that recompute, in the order in which they are tried
MOST = 0.9  # share of the memory that an estimate may fill: kernels have temporary memory
GIB = 2**30

Estimate = Callable[[int, float], float]  # bytes of a micro-batch and a share of blocks that recompute


def check_samples(setup: Setup) -> None:
    """Raise UserError for more samples of an epoch, or of an evaluation of the known prompts, than the host's memory
    has room for."""
    require_generators(setup.shape.samples, "samples of an epoch (train.prompts x train.group)")
    held_out = setup.config.eval
    require_generators(min(held_out.prompts, len(setup.split[1])) * held_out.samples, "samples of an evaluation")


def choose(sizes: Sequence[int], shares: Iterable[float], room: float, estimate: Estimate) -> tuple[int, float] | None:
    """The largest micro-batch that fits `room` bytes with the first share of blocks with which one does, and that
    share; None without."""
    for share in shares:
        fitting = [size for size in sizes if estimate(size, share) <= room]
        if fitting:
            return max(fitting), share
    return None


def micro_batches(config: Config, processes: int) -> list[int]:
    """The micro-batches to choose from: powers of two up to the samples of a process, or the configured one."""
    if config.train.micro_batch != AUTO:
        return [config.train.rows]
    samples, sizes = config.train.group * config.train.prompts // processes, []
    for size in (2**power for power in range(samples.bit_length())):
        try:
            geometry(config.train.model_copy(update={"micro_batch": size}), processes)
        except UserError:  # its parts do not make the optimizer's steps
            continue
        sizes.append(size)
    return sizes


def fit_micro_batch(config: Config, policy: Any, prompt: Prompt, processes: Processes) -> Config:
    """The configuration with numbers in place of `auto`, the same on all processes, for which the policy is set up.
    The choice is printed with its reason. Raises UserError if not even one row fits."""
    train = config.train
    if AUTO not in (train.micro_batch, train.checkpointing):
        return config
    estimate, shares = measure_estimate(config, policy, prompt)
    rooms = processes.gather(torch.tensor([MOST * free_memory(policy.device)], dtype=torch.float64))
    room, sizes = rooms.min().item(), micro_batches(config, processes.count)
    chosen = choose(sizes, shares, room, estimate)
    if chosen is None:
        raise UserError(f"train.micro_batch {min(sizes)} with train.checkpointing {_key(shares[-1])} takes "
                        f"{estimate(min(sizes), shares[-1]) / GIB:.3g} GiB, and {MOST:.0%} of the free memory are "
                        f"{room / GIB:.3g}: take one of the options that docs/performance.md lists in order, or a "
                        "larger device")
    micro_batch, share = chosen
    if train.checkpointing == AUTO and len(shares) > 1:
        policy.checkpoint(share)
    if processes.first:
        larger = [size for size in sizes if size > micro_batch]
        more = f"; {larger[0]} would take {estimate(larger[0], share) / GIB:.3g}" if larger else ""
        without = f"; with less checkpointing not even {min(sizes)} fits" if share else ""
        print(f"train.micro_batch: {micro_batch}, train.checkpointing: {str(_key(share)).lower()} (auto: "
              f"{estimate(micro_batch, share) / GIB:.3g} GiB of {room / GIB:.3g}, {MOST:.0%} of the free memory{more}"
              f"{without})", flush=True)
    return config.having({"train.micro_batch": micro_batch, "train.checkpointing": _key(share)})


def _key(share: float) -> bool | float:
    return bool(share) if share in (0, 1) else share


def measure_estimate(config: Config, policy: Any, prompt: Prompt) -> tuple[Estimate, Sequence[float]]:
    """The estimate of a run with its policy, measured on one prompt, and the shares to choose from.
    Every phase is linear in the micro-batch. The activations of an update are linear in the share of blocks that
    recompute, beside the one block that recomputes at a time."""
    text = policy.unit == "tokens"
    encode = policy.encode if text else encoded_prompts.prompt_cache(config, policy, policy.live)
    conditioning, before = encode(*encodable([prompt], config.negative_prompt)), policy.evaluations
    if config.image.sizes:
        conditioning = replace(conditioning, sizes=[max(config.image.sizes, key=math.prod)])
    memory = domains.sampled_by(policy.process).memory

    def phases(rows: int) -> dict[str, dict[str, int]]:
        # Completions that are drawn at once become as few as the rows of a micro-batch where memory runs out.
        return memory(policy, config.having({"train.micro_batch": rows, "train.generation_batch": rows}), conditioning)

    # Two measurements fix each phase's line: what it costs at all, and what a row adds.
    once, twice = ({name: sum(parts.values()) for name, parts in phases(rows).items()} for rows in (1, 2))
    # A third one, with every block recomputed, tells what recomputing saves.
    saved, shares = 0, [config.train.recompute_share]
    if config.train.checkpointing == AUTO:
        with contextlib.suppress(UserError):  # a model without blocks
            policy.checkpoint(1.0)
            saved, shares = once["update"] - sum(phases(1)["update"].values()), list(SHARES)
            policy.checkpoint(0.0)
    policy.evaluations = before

    count = getattr(policy.model.config.get_text_config(), "num_hidden_layers", 1) if text else \
        sum(len(blocks(module)) for module in policy.denoisers.values())

    def estimate(rows: int, share: float) -> float:
        grown: dict[str, float] = {name: total + (twice[name] - total) * (rows - 1) for name, total in once.items()}
        grown["update"] -= rows * saved * max(share - 1 / max(count, 1), 0)
        return max(grown.values())

    return estimate, shares
