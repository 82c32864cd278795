"""Hints: lines on what makes a run slow, or keeps it from learning. They do not stop a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from flowgrpo.advantages.group import Advantage, AdvantageRule
from flowgrpo.advantages.reward_weights import Influence
from flowgrpo.device import bf16_speed

TIMES = 100  # one reward's weighted deviation over another's, from which only the first counts
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of all cores and of the clock, of a container


class RewardHints:
    """Hints on the rewards of a run, each printed once.

    advantage: the rule that combines the rewards.
    """

    def __init__(self, advantage: AdvantageRule):
        self.advantage, self._printed = advantage, set[str]()

    def epoch(self, metrics: dict[str, float], spreads: dict[str, float], epoch: int, say: Callable[[str], None]
              ) -> None:
        """Print what an epoch's rewards show. spreads: of each reward within groups, times its weight."""
        silent = [name for name in spreads if metrics[f"reward/{name}/zero_variance_groups"] == 1]
        if len(silent) == len(spreads):
            self._once("all", say, f"epoch {epoch + 1}: in every group all samples earn the same, so nothing is "
                       "learned: take a reward with values in between, prompts of another difficulty, or a larger "
                       "train.group")
            return
        for name in silent:
            self._once(name, say, f"epoch {epoch + 1}: reward {name!r} is the same for all samples of every group "
                       f"(mean {metrics[f'reward/{name}/mean']:.4g}), so that it teaches nothing")
        ranked = sorted((name for name in spreads if spreads[name] > 0), key=lambda name: spreads[name])
        if len(ranked) > 1 and adds(self.advantage) and spreads[ranked[-1]] >= TIMES * spreads[ranked[0]]:
            small, large = ranked[0], ranked[-1]
            self._once("scale", say, f"epoch {epoch + 1}: reward {large!r} varies by {spreads[large]:.3g} within "
                       f"groups and {small!r} by {spreads[small]:.3g}, weights included, so that {small!r} hardly "
                       "counts: change their weights, or compare each by itself, parts.advantage: {type: Advantage, "
                       "scale: group, order: advantages}")

    def _once(self, key: str, say: Callable[[str], None], line: str) -> None:
        if key not in self._printed:
            self._printed.add(key)
            say(line)


def adds(advantage: AdvantageRule) -> bool:
    """Return True for a rule that adds weighted rewards of any scale, and does not scale each of them first."""
    if isinstance(advantage, Advantage):
        return advantage.order == "rewards" or advantage.scale in ("none", "leave_one_out")
    return not isinstance(advantage, Influence)


def of_machine(precision: str, device: str | torch.device) -> Iterator[str]:
    """Return hints on a run's use of a CPU; none on another device.

    precision: as the recipe asks for, `auto` included.
    """
    if torch.device(device).type != "cpu":
        return
    if precision == "bf16" and (speed := bf16_speed()) < 1:
        yield (f"hint: this CPU has no bf16 arithmetic, and multiplies it {speed:.2g} times as fast as fp32: "
               "--precision=fp32")
    cores, load = available_cores(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if line := busy(torch.get_num_threads(), cores, load):
        yield line


def busy(threads: int, cores: int, load: float) -> str | None:
    """Return a hint where torch has more threads than cores are free; load: of other processes, in cores."""
    free = max(1, cores - round(load))
    if threads <= free:
        return None
    return (f"hint: torch has {threads} threads, but of {cores} cores {free} is free (load {load:.1f}): threads that "
            f"wait for each other are slow, OMP_NUM_THREADS={free} before the command may be faster")


def available_cores(quota: Path = QUOTA) -> int:
    """Return the number of cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores
