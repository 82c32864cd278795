"""Protocol of what evaluation reads of a run's trainer."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.policies.policy import Policy

T = TypeVar("T")


class Trainer(Protocol):
    """Trainer of a run, as far as evaluation reads it. Its parts are classes of `training`, above this room: the
    `GroupSampler` rollouts, `Optimization`, `Progress`, `Extensions`, `FirstRatio` and `Scoring`."""

    config: Config
    policy: Policy
    processes: Processes
    geometry: BatchShape
    held_out: list[Prompt]
    epoch: int
    rollouts: Any
    optimization: Any
    progress: Any
    extensions: Any
    first_ratio: Any
    scoring: Any

    def with_oom_retry(self, work: Callable[[], T], phase: str = "") -> T:
        """Return work(), repeated with half the micro-batch each time that memory runs out."""
