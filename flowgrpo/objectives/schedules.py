"""Schedules of the KL weight over epochs: `schedule(weight, run) -> weight`, from the recipe's weight.

memory["kl"] of the run holds the weight of the previous epoch and its measured KL, the mean over the decisions of
its updates (None if it trained nothing). The first epoch has no such entry. Without a schedule, None, every epoch has
the recipe's weight.
"""

from __future__ import annotations

from typing import Annotated, Protocol

from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.types import RunState


class Schedule(Protocol):
    """Weight of each epoch."""

    def __call__(self, weight: float, run: RunState) -> float:
        """Return the weight of the run's epoch. weight: the recipe's."""

    def silent(self, weight: float) -> bool:
        """Return True if the weight is 0 in every epoch. Raises ValueError for one that it cannot change."""


@part("kl.schedule")
class Linear:
    """From the recipe's weight in the first epoch to `last` in the run's last one: the dynamic KL of GRPO-D, weak while
    the policy explores and strong later (OThink-MR1, 2503.16081).

    The straight line between the two is our choice.
    """

    last: Annotated[float, AtLeast(0)]

    def __call__(self, weight: float, run: RunState) -> float:
        return weight + (self.last - weight) * run.epoch / max(run.epochs - 1, 1)

    def silent(self, weight: float) -> bool:
        return weight == self.last == 0


@part("kl.schedule", jointly={"target factor": "above 0 and above 1"})
class Adaptive:
    """Multiply the weight by `factor` after an epoch with a KL above 1.5 target, divide it after one below target / 1.5
    (PPO, 1707.06347, section 4).

    The first epoch has the recipe's weight, which must be above 0. A KL of exactly 0 is that of a policy that has not
    left its reference yet: it changes nothing. target is in the unit of the KL, a mean over the latent's values.
    """

    target: Annotated[float, Above(0)]
    factor: Annotated[float, Above(1)] = 2.0

    def __call__(self, weight: float, run: RunState) -> float:
        before = run.memory.get("kl")
        if before is None:
            return weight
        weight, measured = before["weight"], before["measured"]
        if not measured:
            return weight
        if measured > 1.5 * self.target:
            return weight * self.factor
        return weight / self.factor if measured < self.target / 1.5 else weight

    def silent(self, weight: float) -> bool:
        if weight == 0:
            raise ValueError("Adaptive: the KL's weight is 0, which no factor raises, expected above 0")
        return False
