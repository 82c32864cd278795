"""Early ends of a run: the saved checkpoint and the message. Out of memory, the failed phase is repeated with half the
micro-batch, which later phases keep.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from flowgrpo.config.schema import Config
from flowgrpo.device import ran_out
from flowgrpo.distributed.processes import OutOfMemoryElsewhere
from flowgrpo.distributed.signals import Stopped
from flowgrpo.errors import NotFinite, UserError
from flowgrpo.evaluation.report import symptoms
from flowgrpo.policies.policy import Policy
from flowgrpo.policies.weights import adapters
from flowgrpo.storage import checkpoint
from flowgrpo.storage.places import checkpoints
from flowgrpo.training import state
from flowgrpo.training.extension import Run

T = TypeVar("T")


def with_oom_retry(trainer: Run, work: Callable[[], T], phase: str = "") -> T:
    """work(), which leaves nothing behind if it fails; each time that memory runs out, halve the micro-batch, or of
    what draws tokens `geometry.generation_batch` as long as that is not smaller, and repeat it. On several processes
    all fail alike, by `Processes.together`. phase: the name of the one that failed, or the clock's.
    Raises UserError at 1 row, and with sharded weights or context parallelism, whose processes share every call.
    """
    shape, processes = trainer.geometry, trainer.processes
    draws_tokens = trainer.policy.unit == "tokens" and not phase
    while True:
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            reason = first_line(error)
            elsewhere = isinstance(error, OutOfMemoryElsewhere)
            place = "on another process" if elsewhere else f"in the {phase or trainer.clock.phase}"
        size = "generation_batch" if draws_tokens and shape.generation_batch >= shape.micro_batch else "micro_batch"
        rows = getattr(shape, size)
        if rows == 1 or processes.lockstep is not None or processes.members > 1:
            raise UserError(f"out of memory {place} with train.{size} {rows} ({reason}): "
                            f"{'lower it, ' if rows > 1 else ''}set train.checkpointing: true or another "
                            "of the options that docs/performance.md lists in order, or take a larger device")
        # Here the error and its frames are gone, and with them the tensors that they held.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        trainer.kl_reference.cached = {}  # scores of larger batches
        if processes.first:
            trainer.log(f"out of memory {place}: train.{size} {rows} -> {rows // 2} from here on")
        setattr(shape, size, rows // 2)
        processes.parted = False


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


@contextmanager
def save_on_stop(trainer: Run, folder: Path) -> Iterator[None]:
    """Context manager around the epochs: save the last whole one if a stop or an error ends them.
    A checkpoint that is being written is waited for, except by a second signal."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            trainer.progress.saving.finish_writing()
            raise
        save_whole(trainer, folder, trainer.processes.parted)
        if isinstance(error, OutOfMemoryElsewhere):
            raise Stopped(str(error)) from None
        raise UserError(f"out of memory ({first_line(error)}): lower train.micro_batch (now "
                        f"{trainer.geometry.micro_batch}) or set train.checkpointing: true; --resume goes on from the "
                        "last checkpoint") from None
    except Stopped:
        if save_whole(trainer, folder):
            trainer.log(f"stopped after epoch {trainer.epoch}, saved in {folder}; --resume goes on")
        raise
    except UserError as error:
        if save_whole(trainer, folder, spoiled=isinstance(error, NotFinite)):
            trainer.log(f"epoch {trainer.epoch} is saved in {folder}; --resume goes on from it")
        raise
    except Exception:
        trainer.progress.saving.finish_writing()
        raise
    finally:
        trainer.extensions.close()


@contextmanager
def evaluating(trainer: Run, folder: Path, which: str) -> Iterator[None]:
    """Context manager around an evaluation outside the epochs: save the run if a stop ends it. which: its name."""
    with trainer.stop:
        try:
            yield
        except Stopped:
            if save_whole(trainer, folder) and trainer.processes.first:
                print(f"stopped in the {which} evaluation, epoch {trainer.epoch} is saved in {folder}; --resume goes "
                      "on", flush=True)
            raise


@contextmanager
def explain_not_finite(trainer: Run, folder: Path) -> Iterator[None]:
    """Context manager: raise UserError for samples that are not finite, with its likely cause and the way on."""
    try:
        yield
    except NotFinite as error:
        raise UserError(f"{error.found}, and no reward has seen it: {_cause(trainer, folder)}") from None


def _cause(trainer: Run, folder: Path) -> str:
    """The cause of samples that are not finite: first trained weights, then those of the model, then the precision."""
    change = trainer.progress.saved_counters.get("change", 0.0)
    if not change < symptoms.GROWN:
        return (f"training has changed the weights by {change:.1e} times the size of a usual layer, train.lr "
                f"({trainer.config.train.rate}) is too large: {way_back(trainer, folder)}")
    pipe: Any = getattr(trainer.policy, "pipe", None)
    parts = pipe.components if pipe is not None else {"model": getattr(trainer.policy, "model", None)}
    if line := adapters.culprit(parts):
        return line
    half = trainer.config.precision
    advice = ("look at the model's autoencoder and denoiser" if half == "fp32" else
              f"look first at the precision ({half}: try --precision={'bf16 or ' * (half == 'fp16')}fp32), then at the "
              "model's autoencoder and denoiser")
    return advice + (f", then at train.lr ({trainer.config.train.rate})" if trainer.optimization.update else "")


def way_back(trainer: Run, folder: Path) -> str:
    """Set checkpoints whose weights have grown aside; the advice to go on from the last good one, or to begin anew."""
    trainer.progress.saving.finish_writing()
    places = checkpoints(folder / "checkpoints")
    good = [epoch for epoch, path in places.items() if not checkpoint.is_marked(path, checkpoint.GROWN)]
    for epoch in places.keys() - good:
        with suppress(OSError):  # another process has
            checkpoint.set_aside(places[epoch])
    return f"--resume with a smaller one goes on from epoch {max(good)}" if good else "begin anew with a smaller one"


def save_whole(trainer: Run, folder: Path, wait: bool = True, spoiled: bool = False) -> bool:
    """Save an interrupted run, unless the broken epoch has already changed the weights: it will be run again.
    spoiled: samples of these weights are not finite on this process, so that they are not saved.
    wait: for the other processes, which have to be here too; weights that changed on one of them are not whole.
    Returns True if it was saved."""
    if wait:
        trainer.progress.saving.look(wait=True)
    else:
        trainer.progress.saving.finish_writing()
    broken = spoiled or trainer.optimization.update != trainer.progress.saved_counters["update"]
    whole = not (trainer.processes.any(broken) if wait else broken)
    if whole:
        state.save(trainer, folder, wait)
    return whole


def export_for_comfyui(config: Config, folder: Path, policy: Policy) -> None:
    """Write a file for ComfyUI if it does not read the run's own, and print which file it takes."""
    from flowgrpo.export.export import for_comfyui

    if told := for_comfyui(config, folder, policy):
        print(told, flush=True)
