"""Checkpoints on the way. Large ones are written by a thread while training goes on.

Their tensors are copied to the host's memory; then the thread writes the files, forces them to the disk and renames
them, as `storage.checkpoint` does. The next checkpoint, a stop, an error and the end of the run wait for the thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from flowgrpo.device import free_memory
from flowgrpo.storage import checkpoint
from flowgrpo.storage.background import Background
from flowgrpo.training import state
from flowgrpo.training.run import Run

LARGE = 2**28  # bytes of a process's tensors; a smaller checkpoint is written without a thread


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
            whole, values = _copied(shard.whole, shard.values)
            self._steps = [partial(checkpoint.save, place, epoch, whole, values, keep, begun=True)
                           if trainer.processes.first else _nothing]
            self.writer.start(partial(checkpoint.save_shard, place, epoch, _copied(shard.parts, {})[0], shard.index,
                                      shard.count) if shard.writes else _nothing)
        elif trainer.processes.first:
            self.writer.start(partial(checkpoint.save, place, epoch, *_copied(*state.contents(trainer)), keep))
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
            with processes.together() if shared else nullcontext():
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
            small = size < LARGE or 2 * size > unused_memory()
        return not trainer.processes.any(small)


def unused_memory() -> int:
    """Return the bytes of the host's memory that this process can have beside those that it holds."""
    import psutil

    return free_memory("cpu") - psutil.Process().memory_info().rss


def _copied(tensors: checkpoint.Tensors, values: dict[str, Any]) -> tuple[checkpoint.Tensors, dict[str, Any]]:
    """Return copies that training does not change, the tensors in the host's memory."""
    return ({key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}, copy.deepcopy(values))


def _nothing() -> None:
    """Write nothing, as a process whose part another one writes."""
