"""Sides of a run whose last processes only sample: each side divides, gathers and sums among its own processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import distributed

from flowgrpo.distributed.processes import PATIENCE

if TYPE_CHECKING:
    from accelerate import Accelerator


class Side:
    """Accelerate's object of the processes of one side; what it does not have is that of all.

    rollouts: the number of processes that only sample, the last ones; trains: that of the others.
    whole: the object of all processes. samples: this process is one that only samples.
    group: of this side. up: of all, for samples; down: of the first process and of those that sample, for weights. Both
    are of gloo, which carries tensors of the CPU.
    """

    def __init__(self, accelerator: Accelerator, rollouts: int):
        self.whole, self.rollouts = accelerator, rollouts
        count, rank = accelerator.num_processes, accelerator.process_index
        self.trains, self.is_main_process = count - rollouts, accelerator.is_main_process
        self.samples = rank >= self.trains
        self.num_processes = rollouts if self.samples else self.trains
        self.process_index = rank - self.trains if self.samples else rank
        train, sample = range(self.trains), range(self.trains, count)
        groups = [distributed.new_group([*ranks], PATIENCE) for ranks in (train, sample)]
        self.group: Any = groups[self.samples]
        self.up: Any = distributed.new_group(timeout=PATIENCE, backend="gloo")
        self.down: Any = distributed.new_group([0, *sample], PATIENCE, "gloo")

    def end_training(self) -> None:
        """Do nothing: `whole.end_training` comes when the other side has ended too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)
