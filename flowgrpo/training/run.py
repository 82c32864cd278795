"""Run, as the functions and extensions of the training loop read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.cores import Threads
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.signals import Stop
from flowgrpo.log import PhaseTimer
from flowgrpo.methods.method import Method
from flowgrpo.policies.policy import Policy
from flowgrpo.policies.weights.change import Change
from flowgrpo.rollouts.base import GroupSampler
from flowgrpo.storage.checkpoint import Stateful
from flowgrpo.training.best import BestWeights
from flowgrpo.training.first_ratio import FirstRatio
from flowgrpo.training.kl_reference import KLReference
from flowgrpo.training.optimizer import Optimization
from flowgrpo.training.scoring import Scoring

if TYPE_CHECKING:
    from accelerate import Accelerator

    from flowgrpo.evaluation.looks import Looks
    from flowgrpo.evaluation.measured import Measured

T = TypeVar("T")


class Writer(Protocol):
    """Writer of a run's checkpoints: `saving.Saving`."""

    def __call__(self, folder: Path, last: bool) -> None:
        """Save a checkpoint. last: return when it is written."""

    def look(self, wait: bool = False) -> None:
        """Raise the error of a write that failed. wait: return when all is written."""

    def finish_writing(self) -> None:
        """Wait for this process's own write."""


class Progress(Protocol):
    """Counters of a run: `epochs.Progress`."""

    sampled: int
    seconds: float
    reward_seconds: float
    unscored: Counter[str]
    begun: float
    evaluation_due: bool
    best: BestWeights
    saved_counters: dict[str, Any]
    threads: Threads
    repeated: dict[int, int]
    base: Looks

    @property
    def change(self) -> Change:
        """Return what tells how far training has moved the weights."""

    @property
    def saving(self) -> Writer:
        """Return the writer of checkpoints."""


class Extended(Protocol):
    """Extensions of a run: `extension.Extensions`."""

    def stateful(self) -> dict[str, Stateful]:
        """Return those that have a state in a checkpoint, by name."""

    def judge(self, measured: Measured) -> dict[str, Any]:
        """Return their values of an evaluation on the way, for the choice of weights."""

    def on_measured(self, measured: Measured) -> dict[str, Any]:
        """Return their metrics of an evaluation on the way."""

    def on_finished(self, measured: Measured) -> None:
        """Give them the last measurement of the run."""

    def summary(self) -> list[str]:
        """Return what they say in the run's summary."""

    def close(self) -> None:
        """End their threads."""


class Run(Protocol):
    """Attributes of a `train.Trainer`, which says what each is.

    A phase replaces config, geometry, rollouts, prompts and method, so that they are read when they are needed.
    """

    config: Config
    accelerator: Accelerator
    policy: Policy
    prompts: list[Prompt]
    held_out: list[Prompt]
    method: Method
    processes: Processes
    geometry: BatchShape
    memory: dict[str, Any]
    scoring: Scoring
    clock: PhaseTimer
    stop: Stop
    log: Callable[[str], None]
    rollouts: GroupSampler[Any]
    optimization: Optimization
    kl_reference: KLReference
    first_ratio: FirstRatio
    epoch: int

    @property
    def progress(self) -> Progress:
        """Return what the run has done so far."""

    @property
    def extensions(self) -> Extended:
        """Return the features that most runs lack."""

    def run_epoch(self) -> dict[str, Any]:
        """Run one epoch; return its metrics."""

    def with_oom_retry(self, work: Callable[[], T], phase: str = "") -> T:
        """Return work(), repeated with half the micro-batch each time that memory runs out."""
