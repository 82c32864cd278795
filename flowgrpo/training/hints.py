"""Hints: lines on what makes a run slow, or keeps it from learning. They do not stop a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from flowgrpo.device import bf16_speed

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of all cores and of the clock, of a container


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
