"""Clocks and counters of gpu_report.py: seconds, peaks of memory, kernels, and waits of the host for the GPU."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

Line = dict[str, Any]
GIB = 2**30


def timed(work: Callable[[], Any], device: torch.device, repetitions: int = 3, warm: int = 1) -> float:
    """Return the median seconds of a piece of work, to the end of its last kernel, after `warm` runs of it."""
    seconds = []
    for turn in range(warm + repetitions):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn >= warm:
            seconds.append(time.perf_counter() - start)
    return median(seconds)


@contextmanager
def peaks(device: torch.device) -> Iterator[Line]:
    """Context manager: the line that it gives has the peaks of memory in GiB at the end; empty without a GPU.

    The allocator keeps its blocks: with an empty cache, what is timed would pay for its growth again.
    """
    line: Line = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    yield line
    if device.type == "cuda":
        line["allocated GiB"] = torch.cuda.max_memory_allocated() / GIB
        line["reserved GiB"] = torch.cuda.max_memory_reserved() / GIB


def detached(value: Any) -> Any:
    """Return a copy of a call's inputs that depends on nothing."""
    if torch.is_tensor(value):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: detached(part) for key, part in value.items()}
    return type(value)(map(detached, value)) if isinstance(value, (tuple, list)) else value


def repeated(value: Any, rows: int, of: int) -> Any:
    """Return a call's inputs of `of` rows with `rows` rows: tensors of so many rows repeat theirs."""
    if torch.is_tensor(value):
        return value[torch.arange(rows) % of] if value.ndim and len(value) == of else value
    if isinstance(value, dict):
        return {key: repeated(part, rows, of) for key, part in value.items()}
    return type(value)(repeated(part, rows, of) for part in value) if isinstance(value, (tuple, list)) else value


def profiled(work: Callable[[], Any]) -> tuple[int, float]:
    """Return (number, seconds) of the kernels of a piece of work on a GPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    kernels = seen.key_averages()  # not events(), which take minutes for an epoch
    return sum(event.count for event in kernels), sum(event.self_device_time_total for event in kernels) / 1e6


def waits(work: Callable[[], Any]) -> Counter[str]:
    """Return how often the host waited for the GPU, by file and line of the Python code."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{'/'.join(Path(warning.filename).parts[-2:])}:{warning.lineno}" for warning in caught
                   if "synchroniz" in str(warning.message))
