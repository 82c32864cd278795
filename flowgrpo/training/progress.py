"""Progress of a run: its counters, its best weights so far, and the thread that writes its checkpoints."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from flowgrpo.cores import Threads
from flowgrpo.distributed import signals
from flowgrpo.distributed.processes import Processes
from flowgrpo.evaluation.looks import Looks
from flowgrpo.policies.policy import Policy
from flowgrpo.policies.weights.change import Change
from flowgrpo.training.best import BestWeights

NAME = "checkpoint"  # of the thread


class Saving:
    """Writes of a checkpoint in a daemon thread, step by step, while training goes on.

    Of sharded weights, every process writes its shard; when all are done, the first one writes the rest and the
    manifest. Until then it is no checkpoint.
    """

    def __init__(self, processes: Processes, sharded: bool):
        self.processes, self.sharded = processes, sharded
        self._running: Future[object] | None = None
        self._steps: list[Callable[[], object]] = []  # that follow the write which runs
        self._pending = False  # with sharded weights the same on all processes

    @property
    def busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def start(self, steps: Sequence[Callable[[], object]]) -> None:
        """Begin the first step, if any; each of the others begins at a `look` behind the end of the one before."""
        self._steps = [*steps]
        self._begin()
        self._pending = True

    def _begin(self) -> None:
        if self._steps:
            self._running = Future()
            threading.Thread(target=signals.complete, args=(self._running, self._steps.pop(0)), daemon=True, name=NAME
                             ).start()

    def _wait(self) -> None:
        """Wait for the running write. Raises the error of the last one, once; a signal's handler may end it."""
        if (running := self._running) is not None:
            error = running.exception()
            self._running = None
            if error is not None:
                raise error

    def look(self, wait: bool = False) -> None:
        """Raise the error of a write that failed, and go on with the next step of one that is done.
        wait: return when all is written. With sharded weights every process calls it."""
        while self._pending:
            if not wait and (self.processes.any(self.busy) if self.sharded else self.busy):
                return
            self._pending = False
            with self.processes.collective() if self.sharded else nullcontext():
                self._wait()
            self._pending = bool(self._steps)
            self._begin()

    def finish_writing(self) -> None:
        """Wait for this process's own write, without the others; print a line if it failed."""
        try:
            self._wait()
        except Exception as error:
            print(f"a checkpoint could not be written: {type(error).__name__}: {' '.join(str(error).split())}",
                  flush=True)


@dataclass(eq=False)
class Progress:
    """Progress of a run.

    change: how far training has moved the weights, called. best: the best weights that were measured.
    threads: torch's on a CPU; repeated: those of epochs that the run trained before it was interrupted, by number.
    sampled: images or completions. seconds: of training, without evaluations; reward_seconds: of them, those that were
    spent on waiting for rewards. begun: the clock's time at which training would have begun without a pause.
    evaluation_due: the last epoch is trained, and its evaluation is not done.
    unscored: epochs in a row, up to the last one, in which each trained reward failed on every sample.
    saved_counters: the counters at the end of the last whole epoch, as a checkpoint has them.
    base: looks of the base's held-out images.
    """

    change: Change
    best: BestWeights
    saving: Saving
    threads: Threads
    repeated: dict[int, int] = field(default_factory=dict)
    sampled: int = 0
    seconds: float = 0.0
    reward_seconds: float = 0.0
    begun: float = 0.0
    evaluation_due: bool = False
    unscored: Counter[str] = field(default_factory=Counter)
    saved_counters: dict[str, Any] = field(default_factory=dict)
    base: Looks = field(default_factory=Looks)

    @classmethod
    def begin(cls, policy: Policy, processes: Processes, best: BestWeights) -> "Progress":
        """Progress of a run that has trained nothing."""
        saving = Saving(processes, policy.weights.sharded)
        return cls(Change(policy.weights), best, saving, Threads.for_device(policy.device))
