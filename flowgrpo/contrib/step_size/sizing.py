"""Sizes of steps: the calibration of a learning rate, without a model.

A signal s is linear in a small step. Rounding adds a floor f that is independent of what was learned and hardly depends
on the step, so that what is read is sqrt(s^2 + f^2). Therefore a step is read at several times its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import geometric_mean

Measure = Callable[[float], float]  # what is read of the present step, multiplied by a factor

NEAR = 1.25  # a step is sized once its signal is within this factor of the target
TRIES = 16  # replays that size one step at most
SHRINK, GROW = 1e-2, 1e3  # factors of one try
LOWEST = 0.3  # of the target: a smaller signal is taken for that
SPIKE = 3.0  # a later step is cut where its signal is that many times the target
FASTEST = 2.0  # factor by which one later update changes the rate
HIGHEST = 1.0  # learning rate at most


def rounding(read: float, signal: float) -> float:
    """Return the floor f of what is read of a step, sqrt(signal^2 + f^2)."""
    return math.sqrt(max(read**2 - signal**2, 0.0))


def sized(signal: Measure, target: float, most: float = math.inf, known: float | None = None) -> tuple[float, float]:
    """Return the factor of a step with which its signal is the target, and this signal.

    most: bound of the factor. known: the signal of the step as it is.
    """
    factor, found = 1.0, signal(1.0) if known is None else known
    for _ in range(TRIES):
        if math.isfinite(found) and target / NEAR <= found <= target * NEAR:
            break
        change = SHRINK if not math.isfinite(found) else min(max(target / max(found, 1e-12), SHRINK), GROW)
        if factor * change > most:
            change = most / factor
        if change == 1:
            break
        factor *= change
        found = signal(factor)
    return factor, found


@dataclass
class Calibration:
    """State of a calibration. target: of the signal, at the whole rate. reach: factor at which a step is read.

    scale: factor of the learning rate so far, from the one it began with. floor: of rounding, in the last update; None
    before the first one. done: updates that were measured. moved: the signal of the last one, over what the schedule
    leaves of the rate. scales: behind the second half of the updates; their geometric mean is kept, since one reading
    is noisy.
    """

    target: float
    updates: int
    reach: float = 1.0
    scale: float = 1.0
    floor: float | None = None
    done: int = 0
    moved: float = 0.0
    scales: list[float] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.done >= self.updates

    @property
    def highest_floor(self) -> float:
        """Floor above which a reading is rounding for a good part: half of what is read of the target."""
        return self.target * self.reach / 2

    def __call__(self, measure: Measure, left: float, rate: float) -> float:
        """Size an update, and the rate of the next; return the factor of its step.

        left: of the learning rate by its schedule, at this update. rate: the learning rate of the step, without it.

        The first step is scaled until it moves the target. A later one is scaled only if it is a spike; else it
        corrects the rate of the next one by half of its error, in logarithms. The last reading is of the step itself:
        what it has more than the signal is rounding.
        """
        target, most = self.target * left, HIGHEST / rate
        factor, signal, scaled = self._step(lambda factor: measure(self.reach * factor) / self.reach, target, most)
        self.floor = rounding(measure(factor), signal)
        if scaled:
            self.scale, self.moved = self.scale * factor, self.target
        elif target * self.reach > self.floor:  # else the schedule has left nothing that can be read
            moved = max(signal, LOWEST * target)
            self.moved = self.target * moved / target
            self.scale *= min(max((target / moved)**0.5, 1 / FASTEST), FASTEST, most)
        self.done += 1
        if self.done > self.updates // 2:
            self.scales.append(self.scale)
        if self.ended:
            self.scale = geometric_mean(self.scales)
        return factor

    def _step(self, signal: Measure, target: float, most: float) -> tuple[float, float, bool]:
        """Return the factor of a step, its signal, and whether it is scaled."""
        if self.floor is None:
            return *sized(signal, target, most), True
        known = signal(1.0)
        if math.isfinite(known) and known <= SPIKE * max(target, 2 * self.floor / self.reach):
            return 1.0, known, False
        return *sized(signal, target, most, known), True
