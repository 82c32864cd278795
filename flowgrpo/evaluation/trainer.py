"""Protocols of what evaluation reads of a run's trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """Best weights of a run, empty without any, and their epoch. anew: evaluations on the way choose the weights."""

    weights: dict[str, Tensor]
    anew: bool

    @property
    def best(self) -> Epoch: ...

    def forget(self) -> None:
        """Reset, if earlier measurements were made in another way."""

    def summary(self) -> str | None:
        """Kept epoch and the reason of the end, if there is anything to report."""


class FirstRatio(Protocol):
    """Result of the check before the first update."""

    max_log_ratio: float | None
    limit: float
    rescore: bool
    clip: float | None


class Extremes(Protocol):
    """Best and worst samples of the last epoch."""

    def as_json(self, fps: float | None = None) -> dict[str, list[dict[str, Any]]]:
        """Both lists for JSON. fps: frames per second of clips."""


class Scoring(Protocol):
    """Trained rewards, samples of the last epoch, failures of rewards so far, and the last error of each here."""

    reward_failures: dict[str, int]

    @property
    def functions(self) -> Mapping[str, Any]: ...

    @property
    def errors(self) -> dict[str, str]: ...

    @property
    def extremes(self) -> Extremes: ...


class Optimization(Protocol):
    """Optimizer of a run. update: the steps so far; skipped: those that were left out."""

    update: int
    skipped: int

    def evaluated_weights(self) -> dict[str, Tensor]:
        """Weights that are measured and saved."""


class Progress(Protocol):
    """Counters of a run, its best weights so far, and the measure of how far the present ones are from the first."""

    sampled: int
    seconds: float
    reward_seconds: float

    @property
    def best(self) -> Best: ...

    @property
    def change(self) -> Callable[[Processes], float]: ...


class Extended(Protocol):
    """Features of a run that most runs lack."""

    def on_finished(self, measured: Any) -> None:
        """Give them the last measurement of the run."""

    def summary(self) -> list[str]:
        """Their sentences in the run's summary."""


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
    def optimization(self) -> Optimization: ...

    @property
    def progress(self) -> Progress: ...

    @property
    def extensions(self) -> Extended: ...

    @property
    def first_ratio(self) -> FirstRatio: ...

    @property
    def scoring(self) -> Scoring: ...

    def with_oom_retry(self, work: Callable[[], T], phase: str = "") -> T:
        """Return work(), repeated with half the micro-batch each time that memory runs out."""
