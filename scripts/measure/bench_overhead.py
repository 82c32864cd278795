"""Cost of an epoch beyond its denoiser calls.

    python scripts/measure/bench_overhead.py            # the starter, on the CPU; a few minutes

The denoiser's calls of one epoch are recorded with their inputs. Then the epoch (rollout and update), the same calls
bare (forwards, and forwards with backwards where the epoch had them), and the epoch with decoding and reward run in
turns in one process; the medians are divided. The last line is the bare calls with torch's fused attention, beside
the plain one that `flowgrpo.policies.weights.forwards` puts in its place on a CPU. Only ratios are worth
comparing: the seconds are those of the machine and its load.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from common import FIXED, RECIPE, epoch_of, make_trainer, measuring, options, updated

from flowgrpo.config import load
from flowgrpo.data import sets
from flowgrpo.policies.pipelines.call import plain_on_cpu
from flowgrpo.samplers.growth import explore
from flowgrpo.samplers.rollout import seeder
from flowgrpo.train import Trainer

Call = tuple[torch.nn.Module, tuple, dict[str, Any], bool]


def epoch(trainer: Trainer) -> None:
    """Rollout and update of the trainer's present epoch; nothing is decoded or scored, and advantages are +1 and -1."""
    shape, config = trainer.geometry, trainer.config
    batch = sets.draw(trainer.prompts, shape.prompts, trainer.epoch, config.seed)
    conditioning = trainer.rollouts.conditioning(batch)
    parts = list(explore(trainer.policy, conditioning, trainer.rollouts.explorations(trainer.epoch), shape.micro_batch,
                         seeder(config.seed, trainer.epoch)))
    ups_and_downs = 1 - 2.0 * (torch.arange(shape.samples) % 2).view(-1, shape.group, 1)
    ups_and_downs = ups_and_downs.expand(-1, -1, len(config.rewards))
    updated(trainer, epoch_of(trainer, parts, conditioning, batch, ups_and_downs))


def recorded(trainer: Trainer) -> list[Call]:
    """Denoiser calls of one epoch, with their inputs and whether a backward follows."""
    calls: list[Call] = []

    def keep(module, args, kwargs):
        calls.append((module, *(detached(part) for part in (args, kwargs)), torch.is_grad_enabled()))

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in trainer.policy.denoisers.values()]
    epoch(trainer)
    for hook in hooks:
        hook.remove()
    return calls


def detached(value: Any) -> Any:
    """Copies of a call's inputs; those in a graph, as of text encoders that are trained, are leaves that take one."""
    if torch.is_tensor(value):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: detached(part) for key, part in value.items()}
    return type(value)(map(detached, value)) if isinstance(value, (tuple, list)) else value


def bare(trainer: Trainer, calls: list[Call], fused: bool = False) -> None:
    """Recorded calls alone."""
    with nullcontext() if fused else plain_on_cpu(trainer.policy.device), trainer.policy.driver.arithmetic():
        for module, args, kwargs, backward in calls:
            with torch.set_grad_enabled(backward):
                out = module(*args, **kwargs)[0]
            if backward:
                out.backward(torch.ones_like(out))


def in_turns(work: dict[str, Callable[[], None]], repetitions: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each piece of work, the pieces run in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repetitions):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


def main() -> None:
    args = measuring(__doc__).parse_args()
    config = load(RECIPE, FIXED | {"train.prompts": "2", "device": args.device} | options(args.option))
    trainer = make_trainer(config)
    epoch(trainer)  # the first one also checks the ratio, and warms everything up
    calls = recorded(trainer)
    work = {"epoch": partial(epoch, trainer), "bare": partial(bare, trainer, calls), "full": trainer.run_epoch,
            "fused": partial(bare, trainer, calls, fused=True)}
    found = in_turns(work, args.repetitions, trainer.policy.device)
    backward = sum(call[3] for call in calls)
    print(f"{config.method}, {trainer.geometry.samples} rows of {config.train.steps} steps: {len(calls) - backward} "
          f"forwards, {backward} forwards with backwards; {torch.get_num_threads()} threads; medians of "
          f"{args.repetitions}")
    titles = {"epoch": "rollout and update", "full": "with decoding and reward", "bare": "the denoiser calls alone",
              "fused": "those with fused attention"}
    for name, title in titles.items():
        print(f"{title:<27} {found[name]:7.3f} s  {found[name] / found['bare']:5.2f}")


if __name__ == "__main__":
    main()
