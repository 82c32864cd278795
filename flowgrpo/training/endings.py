"""Early ends of a run: the saved checkpoint and the message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowgrpo.device import ran_out
from flowgrpo.distributed.processes import OutOfMemoryElsewhere
from flowgrpo.distributed.signals import Stopped
from flowgrpo.errors import UserError
from flowgrpo.training import state
from flowgrpo.training.out_of_memory import why
from flowgrpo.training.run import Run


@contextmanager
def saved(trainer: Run, folder: Path) -> Iterator[None]:
    """Context manager around the epochs: save the last whole one if a stop or an error ends them.

    A checkpoint that is being written is waited for, except by a second signal.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            trainer.progress.saving.finish_writing()
            raise
        save_whole(trainer, folder, trainer.processes.parted)
        if isinstance(error, OutOfMemoryElsewhere):
            raise Stopped(str(error)) from None
        raise UserError(f"out of memory ({why(error)}): lower train.micro_batch (now "
                        f"{trainer.geometry.micro_batch}) or set train.checkpointing: true; --resume goes on from the "
                        "last checkpoint") from None
    except Stopped:
        if save_whole(trainer, folder):
            trainer.say(f"stopped after epoch {trainer.epoch}, saved in {folder}; --resume goes on")
        raise
    except UserError:
        if save_whole(trainer, folder):
            trainer.say(f"epoch {trainer.epoch} is saved in {folder}; --resume goes on from it")
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


def save_whole(trainer: Run, folder: Path, wait: bool = True) -> bool:
    """Save an interrupted run, unless the broken epoch has already changed the weights: it will be run again.

    wait: for the other processes, which have to be here too; weights that changed on one of them are not whole.
    Returns True if it was saved.
    """
    if wait:
        trainer.progress.saving.look(wait=True)
    else:
        trainer.progress.saving.finish_writing()
    broken = trainer.optimization.update != trainer.progress.saved_counters["update"]
    whole = not (trainer.processes.any(broken) if wait else broken)
    if whole:
        state.save(trainer, folder, wait)
    return whole
