"""Epochs of a run: train, measure, log and save, until the last one or a stop. A thread writes large checkpoints while
training goes on; throughput is samples and evaluations per second, peak memory, and the share of a GPU's peak
arithmetic.
"""

from __future__ import annotations

import copy
import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from flowgrpo.config.schema import Config
from flowgrpo.cores import Threads
from flowgrpo.device import DTYPES, free_memory
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.evaluation import held_out
from flowgrpo.evaluation.looks import LOOKS, Looks
from flowgrpo.evaluation.report import symptoms
from flowgrpo.evaluation.report.verdict import last_error
from flowgrpo.evaluation.runs import HELD_OUT
from flowgrpo.gpus import GPUS
from flowgrpo.nouns import quantity
from flowgrpo.policies.policy import Policy
from flowgrpo.policies.weights.change import Change
from flowgrpo.storage import checkpoint
from flowgrpo.storage.atomic import Background
from flowgrpo.storage.checkpoint import GROWN, UNSTEADY
from flowgrpo.training import endings, extensions, state
from flowgrpo.training.best import BestWeights
from flowgrpo.training.metrics import Log, progress_metrics
from flowgrpo.training.run import Run

LARGE = 2**28  # bytes of a process's tensors; a smaller checkpoint is written without a thread
# Dense TFLOP/s of bf16 or fp16, and of fp32, of the makers' data sheets, by words of a device's name: the first whose
# words are all in it. Parts of a GPU and variants of these words have others.
PEAKS = {"H100 PCIe": (756, 51), "H100 NVL": (835, 60), "H200 NVL": (835, 60)} | {
    name: (gpu.half, gpu.single) for name, gpu in GPUS.items()}
OTHERS = {"MIG", "LAPTOP", "D", "SUPER", "TI"}


class Saving:
    """Writer of a run's checkpoints.

    Of sharded weights, every process writes its shard; when all are done, the first one writes the rest and the
    manifest. Until then it is no checkpoint.
    """

    def __init__(self, trainer: Run):
        self.trainer, self.writer = trainer, Background()
        self._steps: list[Callable[[], object]] = []  # that follow the write which runs
        self._pending = False  # with sharded weights the same on all processes

    def __call__(self, folder: Path, last: bool) -> None:
        """Save a checkpoint as of the end of the last whole epoch. last: return when it is written.

        Raises the error of an earlier write, and UserError for weights that are not finite.
        """
        self.look(wait=True)
        if last or not self._later():
            state.save(self.trainer, folder)
            return
        state.require_finite(self.trainer)
        trainer, place = self.trainer, folder / "checkpoints"
        epoch, keep = trainer.epoch, trainer.config.train.keep
        self._steps = []
        if trainer.policy.weights.sharded:
            shard = state.begin_shards(trainer, place)
            whole, values = _copy(shard.whole, shard.values)
            self._steps = [partial(checkpoint.save, place, epoch, whole, values, keep, begun=True)
                           if trainer.processes.first else _nothing]
            self.writer.start(partial(checkpoint.save_shard, place, epoch, _copy(shard.parts, {})[0], shard.index,
                                      shard.count) if shard.writes else _nothing)
        elif trainer.processes.first:
            self.writer.start(partial(checkpoint.save, place, epoch, *_copy(*state.contents(trainer)), keep))
        self._pending = True

    def look(self, wait: bool = False) -> None:
        """Raise the error of a write that failed, and go on with the next step of one that is done.

        wait: return when all is written. With sharded weights every process calls it.
        """
        processes, shared = self.trainer.processes, self.trainer.policy.weights.sharded
        while self._pending:
            if not wait and (processes.any(self.writer.busy) if shared else self.writer.busy):
                return
            self._pending = False
            with processes.collective() if shared else nullcontext():
                self.writer.wait()
            if self._steps:
                self.writer.start(self._steps.pop(0))
                self._pending = True

    def finish_writing(self) -> None:
        """Wait for this process's own write, without the others; print a line if it failed."""
        try:
            self.writer.wait()
        except Exception as error:
            print(f"a checkpoint could not be written: {type(error).__name__}: {' '.join(str(error).split())}",
                  flush=True)

    def _later(self) -> bool:
        """Return True, on all processes alike, if the checkpoint is large and the hosts have memory for a copy."""
        trainer = self.trainer
        small = False
        if trainer.processes.first or trainer.policy.weights.sharded:
            size = state.size(trainer)
            small = size < LARGE or 2 * size > available_memory()
        return not trainer.processes.any(small)


def available_memory() -> int:
    """Return the bytes of the host's memory that this process can have beside those that it holds."""
    import psutil

    return free_memory("cpu") - psutil.Process().memory_info().rss


def _copy(tensors: checkpoint.Tensors, values: dict[str, Any]) -> tuple[checkpoint.Tensors, dict[str, Any]]:
    """Return copies that training does not change, the tensors in the host's memory."""
    return ({key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}, copy.deepcopy(values))


def _nothing() -> None:
    """Write nothing, as a process whose part another one writes."""


def peak(name: str, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of a GPU of this name, in products of this dtype; None if the table lacks it."""
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

    def epoch(self, run: Callable[[], dict[str, Any]], sampled: Callable[[], int]) -> dict[str, Any]:
        """Run an epoch, to the end of its work on the device; return its metrics, with those of all processes' speed.

        sampled: the samples so far, of all processes. Peaks of memory are in bytes, of the process that has most: a
        GPU's of the epoch, the host's since the start.
        """
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        start, before = perf_counter(), (sampled(), self.policy.evaluations, self._flops())
        metrics = run()
        seconds = perf_counter() - start
        evaluations, flops = self.processes.total([self.policy.evaluations - before[1], self._flops() - before[2]])
        memory = self._memory()
        largest = self.processes.gather(torch.tensor([[*memory.values()]])).amax(0)
        metrics |= {"samples_per_second": (sampled() - before[0]) / seconds,
                    "evaluations_per_second": evaluations / seconds, **dict(zip(memory, largest.tolist()))}
        if self.meter and self.peak:
            metrics["mfu"] = flops / (seconds * self.peak * self.processes.count)
        return metrics

    def _flops(self) -> int:
        return int(self.meter.total) if self.meter else 0

    def _memory(self) -> dict[str, int]:
        """Return the peaks of this process, in bytes."""
        if self.device.type == "cuda":
            return {"memory/allocated": torch.cuda.max_memory_allocated(self.device),
                    "memory/reserved": torch.cuda.max_memory_reserved(self.device)}
        return {"memory/host": host_peak()}


def host_peak() -> int:
    """Return the largest memory of this process so far, in bytes; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0
    from resource import RUSAGE_SELF, getrusage

    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Progress:
    """Counters of a run, its best weights and the writer of its checkpoints.

    sampled: images or completions. seconds: of training, without evaluations; reward_seconds: of them, those that were
    spent on waiting for rewards. begun: the clock's time at which training would have begun without a pause.
    evaluation_due: the last epoch is trained, and its evaluation is not done.
    unscored: epochs in a row, up to the last one, in which each trained reward failed on every sample.
    change: how far training has moved the weights, called. base: looks of the base's held-out images.
    best: the best weights that were measured. saving: the writer of checkpoints. saved_counters: the counters at the
    end of the last whole epoch, as a checkpoint has them. threads: torch's on a CPU; repeated: those of epochs that the
    run trained before it was interrupted, by their numbers.
    """

    def __init__(self, trainer: Run):
        self.sampled = 0
        self.seconds = 0.0
        self.reward_seconds = 0.0
        self.begun = 0.0
        self.evaluation_due = False
        self.unscored: Counter[str] = Counter()
        self.change = Change(trainer.policy.weights)
        self.best = BestWeights(trainer.config.eval, extensions.best_by(trainer.config, trainer.method))
        self.saving = Saving(trainer)
        self.saved_counters: dict[str, Any] = {}
        self.threads = Threads.of(trainer.policy.device)
        self.repeated: dict[int, int] = {}
        self.base = Looks()


def run(trainer: Run, folder: Path, measured: dict[str, Any]) -> None:
    """Run the remaining epochs; save in between, at the end, and when asked to stop."""
    train, every, progress = trainer.config.train, trainer.config.eval.every, trainer.progress
    run_log = Log(folder, trainer.accelerator, train.epochs, trainer.epoch)
    throughput = Throughput(trainer.config, trainer.policy, trainer.processes)
    trainer.log = run_log.log
    progress.begun = time.perf_counter() - progress.seconds
    with closing(run_log), trainer.stop, endings.save_on_stop(trainer, folder):
        if progress.evaluation_due:  # the run was stopped in the evaluation of its last epoch
            run_log.amend(measure(trainer, folder, measured))
        while trainer.epoch < train.epochs and not progress.best.should_stop:
            settled = settle_threads(trainer)
            metrics = throughput.epoch(lambda: trainer.run_epoch() | trainer.clock.pop(), lambda: progress.sampled)
            change = metrics["weights/change"] = progress.change(trainer.processes)
            endings.require_usable(trainer, folder, change)
            metrics |= trainer.optimization.eps_share(metrics["grad_norm"])
            progress.reward_seconds += metrics["seconds/reward"]
            progress.seconds = time.perf_counter() - progress.begun
            trainer.epoch += 1
            progress.evaluation_due = bool(every) and trainer.epoch % every == 0
            progress.saved_counters = state.counters(trainer)
            progress.saved_counters |= {"change": change}
            if change >= symptoms.GROWN:
                progress.saved_counters |= {UNSTEADY: True, GROWN: True}
            metrics |= settled | {"evaluations": progress.saved_counters["evaluations"],
                                  "seconds": round(progress.seconds, 2)}
            try:
                if progress.evaluation_due:
                    metrics |= measure(trainer, folder, measured)
            finally:
                run_log.epoch(trainer.epoch, metrics, progress_metrics(metrics, trainer.config))
            run_log.report(trainer)
            progress.saving.look()
            if trainer.epoch < train.epochs:
                require_scores(trainer, metrics)
            with trainer.processes.collective():
                trainer.stop.check()
            last = trainer.epoch == train.epochs or progress.best.should_stop
            if last or trainer.epoch % train.save_every == 0:
                progress.saving(folder, last)


def settle_threads(trainer: Run) -> dict[str, int]:
    """Let torch use as many threads on a CPU as cores are free, the same on all processes; return them as a metric.

    An epoch that is repeated has those of its first time, on which the last bits of some sums depend.
    """
    progress = trainer.progress
    if trainer.policy.device.type != "cpu":
        return {}
    before = progress.repeated.get(trainer.epoch + 1)
    wished = torch.tensor([progress.threads.recommend() if before is None else before])
    count = int(trainer.processes.gather(wished).min())
    if line := progress.threads.use(count, "" if before is None else f"as epoch {trainer.epoch + 1} had"):
        trainer.log(line)
    return {"threads": torch.get_num_threads()}


def require_scores(trainer: Run, metrics: dict[str, Any]) -> None:
    """Raise UserError for a trained reward that has failed on all samples of `guard.unscored` epochs in a row.

    One that applies to none of an epoch's prompts is not counted. metrics: of the epoch.
    """
    unscored, most = trainer.progress.unscored, trainer.config.guard.unscored
    for name in trainer.scoring.functions:
        means, failed = (metrics.get(f"reward/{name}/{what}", 0) for what in ("mean", "failed"))
        unscored[name] = 0 if means == means else unscored[name] + bool(failed)
        if most and unscored[name] >= most:
            raise UserError(f"reward {name!r} has failed on every sample of {quantity(most, 'epoch')} in a row, so "
                            "that it trains nothing: see that it answers, and --resume; --guard.unscored=0 goes on "
                            "without its scores" + last_error(trainer.scoring.errors.get(name)))


def measure(trainer: Run, folder: Path, measured: dict[str, Any]) -> dict[str, float]:
    """Measure held-out scores after an epoch and return them; the time is not training's."""
    paused, progress = time.perf_counter(), trainer.progress
    scores = held_out.sample_images(trainer, measured, folder)
    metrics = {f"{HELD_OUT}{name}": value for name, value in scores.mean().items()}
    judged = {f"{HELD_OUT}{name}": value for name, value in trainer.extensions.judge(scores).items()}
    progress.best.see(metrics | judged, trainer.epoch, trainer.optimization.evaluated_weights)
    metrics |= {f"{LOOKS}{name}": share for name, share in scores.looks.of(progress.base).items()}
    metrics |= trainer.extensions.on_measured(scores)
    progress.evaluation_due = progress.saved_counters["unmeasured"] = False
    progress.begun += time.perf_counter() - paused
    return metrics
