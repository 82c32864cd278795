"""Sizes of steps: the calibration of a learning rate, without a model.

A signal s is linear in a small step. Rounding adds a floor f to it that is independent of what was learned, so that
what is read is sqrt(s^2 + f^2). The floor hardly depends on the step, unless the step is too small to change any
rounded value. Therefore it is found from the whole step and half of it, not from a tiny one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import geometric_mean

Measure = Callable[[float], float]  # the signal of the present step, multiplied by a factor

NEAR = 1.25  # a step is sized once its signal is within this factor of the target
TRIES = 16  # replays that size one step at most
SHRINK, GROW = 1e-2, 1e3  # factors of one try
LOWEST = 0.3  # of the target: a signal below it is rounding for the most part, and is read as that
SPIKE = 3.0  # a later step is cut where its signal is that many times the target
FASTEST = 2.0  # factor by which one later update changes the rate
HIGHEST = 1.0  # learning rate at most


def rounding(whole: float, half: float) -> float:
    """Return the floor f of the signals of a step, sqrt(s^2 + f^2), and of half of it, sqrt(s^2 / 4 + f^2).

    A signal that flattens has one too: if the whole is 2 % less than twice the half, 0.12 of it.
    """
    return math.sqrt(max(4 * half**2 - whole**2, 0.0) / 3)


def without_floor(signal: float, floor: float) -> float:
    """Return the part of a signal that is not rounding: sqrt(signal^2 - floor^2), 0 below the floor."""
    return math.sqrt(max(signal**2 - floor**2, 0.0))


def sized(measure: Measure, target: float, floor: float = 0.0, most: float = math.inf, signal: float | None = None
          ) -> float:
    """Return the factor of a step with which its signal, without the floor, is the target.

    most: bound of the factor. signal: of the step as it is, where it is known.
    """
    factor, signal = 1.0, measure(1.0) if signal is None else signal
    for _ in range(TRIES):
        moved = without_floor(signal, floor)
        if math.isfinite(moved) and target / NEAR <= moved <= target * NEAR:
            break
        change = SHRINK if not math.isfinite(moved) else min(max(target / max(moved, 1e-12), SHRINK), GROW)
        if factor * change > most:
            change = most / factor
        if change == 1:
            break
        factor *= change
        signal = measure(factor)
    return factor


@dataclass
class Calibration:
    """State of a calibration. target: of the signal, at the whole rate.

    scale: factor of the learning rate so far, from the one it began with. floor: of rounding, in the last update; None
    before the first one. done: updates that were measured. moved: the signal of the last one without the floor, over
    what the schedule leaves of the rate. scales: behind the second half of the updates; their geometric mean is kept,
    since one reading is noisy.
    """

    target: float
    updates: int
    scale: float = 1.0
    floor: float | None = None
    done: int = 0
    moved: float = 0.0
    scales: list[float] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.done >= self.updates

    def __call__(self, measure: Measure, left: float, rate: float) -> float:
        """Size an update, and the rate of the next; return the factor of its step.

        left: of the learning rate by its schedule, at this update. rate: the learning rate of the step, without it.

        The floor is measured in every update. The first step is scaled until it moves the target. A later one is
        scaled only if it is a spike; else it corrects the rate of the next one by half of its error, in logarithms.
        """
        target = self.target * left
        factor = self._first(measure, target, HIGHEST / rate) if self.floor is None else \
            self._later(measure, target, HIGHEST / rate)
        self.done += 1
        if self.done > self.updates // 2:
            self.scales.append(self.scale)
        if self.ended:
            self.scale = geometric_mean(self.scales)
        return factor

    def _first(self, measure: Measure, target: float, most: float) -> float:
        factor = sized(measure, target, most=most)
        self.floor = rounding(measure(factor), measure(factor / 2))
        if self.floor <= self.target:
            factor *= sized(lambda more: measure(factor * more), target, self.floor, most / factor)
        self.scale *= factor
        self.moved = self.target
        return factor

    def _later(self, measure: Measure, target: float, most: float) -> float:
        signal, factor = measure(1.0), 1.0
        self.floor = rounding(signal, measure(0.5)) if math.isfinite(signal) else self.floor
        if not math.isfinite(signal) or signal > SPIKE * max(target, 2 * self.floor):
            factor = sized(measure, target, self.floor, most, signal)
            self.scale *= factor
            self.moved = self.target
        elif target > self.floor:  # else the schedule has left nothing that can be read
            moved = max(without_floor(signal, self.floor), LOWEST * target)
            self.moved = self.target * moved / target
            self.scale *= min(max((target / moved)**0.5, 1 / FASTEST), FASTEST, most)
        return factor
