"""Protocols of what evaluation reads of a run's trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor

from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.policies.policy import Policy

T = TypeVar("T")


class Epoch(Protocol):
    """Epoch of the best measurement."""

    epoch: int


class Best(Protocol):
    """Best weights of a run, empty without any."""

    weights: dict[str, Tensor]

    @property
    def best(self) -> Epoch:
        """Return the epoch of these weights."""

    def forget(self) -> None:
        """Reset, if earlier measurements were made in another way."""

    def summary(self) -> str | None:
        """Return the kept epoch and the reason of the end, if there is anything to report."""


class FirstRatio(Protocol):
    """Result of the check before the first update."""

    max_log_ratio: float | None
    limit: float
    rescore: bool
    clip: float | None


class Extremes(Protocol):
    """Best and worst samples of the last epoch."""

    def as_json(self, fps: float | None = None) -> dict[str, list[dict[str, Any]]]:
        """Return both lists for JSON. fps: frames per second of clips."""


class Scoring(Protocol):
    """Samples of the last epoch, and failures of rewards so far."""

    reward_failures: dict[str, int]

    @property
    def errors(self) -> dict[str, str]:
        """Return the last error of each reward on this process."""

    @property
    def extremes(self) -> Extremes:
        """Return the best and worst samples of the last epoch."""


class Optimization(Protocol):
    """Optimizer of a run. update: the steps so far; skipped: those that were left out."""

    update: int
    skipped: int

    def evaluated_weights(self) -> dict[str, Tensor]:
        """Return the weights that are measured and saved."""


class Progress(Protocol):
    """Counters of a run, and its best weights so far."""

    sampled: int
    seconds: float
    reward_seconds: float

    @property
    def best(self) -> Best:
        """Return the best weights so far."""


class Extended(Protocol):
    """Features of a run that most runs lack."""

    def on_finished(self, measured: Any) -> None:
        """Give them the last measurement of the run."""

    def summary(self) -> list[str]:
        """Return what they say in the run's summary."""


class Trainer(Protocol):
    """Trainer of a run, as far as evaluation reads it. rollouts: a `GroupSampler` with an `encode`."""

    config: Config
    policy: Policy
    processes: Processes
    geometry: BatchShape
    held_out: list[Prompt]
    rollouts: Any
    epoch: int

    @property
    def optimization(self) -> Optimization:
        """Return the optimizer with its counters."""

    @property
    def progress(self) -> Progress:
        """Return what the run has done so far."""

    @property
    def extensions(self) -> Extended:
        """Return the features that most runs lack."""

    @property
    def first_ratio(self) -> FirstRatio:
        """Return the result of the check before the first update."""

    @property
    def scoring(self) -> Scoring:
        """Return the state of scoring."""

    def with_oom_retry(self, work: Callable[[], T], phase: str = "") -> T:
        """Return work(), repeated with half the micro-batch each time that memory runs out."""
