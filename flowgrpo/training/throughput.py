"""Throughput of an epoch: samples and evaluations per second, peak memory, and the share of a GPU's peak arithmetic."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch

from flowgrpo.config.schema import Config
from flowgrpo.device import DTYPES
from flowgrpo.distributed.processes import Processes
from flowgrpo.gpus import GPUS
from flowgrpo.policies.policy import Policy

# Dense TFLOP/s of bf16 or fp16, and of fp32, of the makers' data sheets, by words of a device's name: the first whose
# words are all in it. Parts of a GPU and variants of these words have others.
PEAKS = {"H100 PCIe": (756, 51), "H100 NVL": (835, 60), "H200 NVL": (835, 60)} | {
    name: (gpu.half, gpu.single) for name, gpu in GPUS.items()}
OTHERS = {"MIG", "LAPTOP", "D", "SUPER", "TI"}


def peak(name: str, dtype: torch.dtype) -> float | None:
    """The FLOP/s of a GPU of this name, in products of this dtype; None if the table lacks it."""
    words = _words(name)
    rates = next((rates for known, rates in PEAKS.items() if _words(known) <= words), None)
    return None if rates is None or words & OTHERS else 1e12 * rates[dtype == torch.float32]


def _words(name: str) -> set[str]:
    return set(name.upper().replace("-", " ").split())


class FlopMeter:
    """FLOPs of denoisers: those of a row's forward are counted once, in a first call, and multiplied from there on.

    backward: forwards that a backward is worth, 1 where gradients pass through frozen weights, 2 where all are trained.
    Recomputed blocks do not count.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], backward: int):
        self.backward, self.total = backward, 0.0
        self._per_row: dict[torch.nn.Module, float] = {}
        self._counting = ExitStack()
        self._states: dict[torch.nn.Module, str] = {}  # names of the first arguments
        for module in modules:
            self._states[module] = next(iter(inspect.signature(module.forward).parameters))
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end, with_kwargs=True, always_call=True)

    def _begin(self, module: torch.nn.Module, _args: tuple[Any, ...]) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        if module not in self._per_row:
            self._counting.enter_context(torch.compiler.set_stance("force_eager"))  # compiled kernels are not counted
            self.counter = self._counting.enter_context(FlopCounterMode(display=False))

    def _end(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self._counting.close()
        if out is None:  # it raised
            return
        rows = len(args[0] if args else kwargs[self._states[module]])
        if module not in self._per_row:
            self._per_row[module] = self.counter.get_total_flops() / rows
        flops = rows * self._per_row[module]
        self._add(flops)
        answer = out if torch.is_tensor(out) else next(iter(out.values() if isinstance(out, dict) else out))
        if torch.is_tensor(answer) and answer.requires_grad:
            answer.register_hook(lambda _: self._add(flops * self.backward))

    def _add(self, flops: float) -> None:
        self.total += flops


class Throughput:
    """Speed and memory of a run's epochs."""

    def __init__(self, config: Config, policy: Policy, processes: Processes):
        self.policy, self.processes, self.device = policy, processes, policy.device
        cuda, modules = self.device.type == "cuda", list(getattr(policy, "denoisers", {}).values())
        self.peak = peak(torch.cuda.get_device_name(self.device), DTYPES[config.precision]) if cuda else None
        # Products of quantised weights are not counted, and a module that is compiled as a whole runs no counter.
        counted = config.memory.weights == "full" and not any(module._compiled_call_impl for module in modules)
        self.meter = FlopMeter(modules, 1 if config.adapter.rank else 2) if self.peak and modules and counted else None

    @contextmanager
    def epoch(self, sampled: Callable[[], int]) -> Iterator[dict[str, Any]]:
        """Context manager around an epoch, to the end of its work on the device: the epoch's metrics, which get those
        of all processes' speed at its end. sampled: the samples so far, of all processes. Peaks of memory are in bytes,
        of the process that has most: a GPU's of the epoch, the host's since the start."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        start, before = perf_counter(), (sampled(), self.policy.evaluations, self._flops())
        metrics: dict[str, Any] = {}
        yield metrics
        seconds = perf_counter() - start
        evaluations, flops = self.processes.total([self.policy.evaluations - before[1], self._flops() - before[2]])
        if self.device.type == "cuda":
            memory = {"memory/allocated": torch.cuda.max_memory_allocated(self.device),
                      "memory/reserved": torch.cuda.max_memory_reserved(self.device)}
        elif sys.platform == "win32":  # does not say
            memory = {"memory/host": 0}
        else:
            from resource import RUSAGE_SELF, getrusage

            unit = 1 if sys.platform == "darwin" else 1024
            memory = {"memory/host": unit * getrusage(RUSAGE_SELF).ru_maxrss}
        largest = self.processes.gather(torch.tensor([[*memory.values()]])).amax(0)
        metrics |= {"samples_per_second": (sampled() - before[0]) / seconds,
                    "evaluations_per_second": evaluations / seconds, **dict(zip(memory, largest.tolist()))}
        if self.meter and self.peak:
            metrics["mfu"] = flops / (seconds * self.peak * self.processes.count)

    def _flops(self) -> int:
        return int(self.meter.total) if self.meter else 0
