"""Plans: which steps of a rollout draw noise and which are trained, `plan(steps, epoch, seed) -> Schedule`.

A plan is a pure function of its arguments, so a resumed run needs no state. Steps are grid indices 0 to T-1 (T =
`steps`). No plan draws noise on the last step, T-1: noise added there stays in the picture as grain, and its deviation
can vanish. Settings that leave nothing to train raise ValueError.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

ORDERS = ("progressive", "random", "decay", "exp_decay", "frozen")


@dataclass(frozen=True)
class Schedule:
    """The steps of one rollout that draw noise, and those of them that are trained; both sorted, neither empty."""

    stochastic: tuple[int, ...]
    trained: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("stochastic", "trained"):
            steps = getattr(self, name)
            if not steps or list(steps) != sorted(set(steps)) or steps[0] < 0:
                raise ValueError(f"{name} steps are {steps}, expected at least one, sorted, from 0 up")
        if extra := sorted(set(self.trained) - set(self.stochastic)):
            raise ValueError(f"steps {extra} are trained but draw no noise: add them to the stochastic steps")


@dataclass(frozen=True)
class AllSteps:
    """Every step but the last draws noise and is trained (Flow-GRPO, 2505.05470)."""

    def __call__(self, steps: int, epoch: int, seed: int) -> Schedule:
        every = tuple(range(_trainable(steps)))
        return Schedule(every, every)


@dataclass(frozen=True)
class RandomSubset:
    """Every step but the last draws noise; int((T-1) * fraction) of them, at least one, are trained, drawn anew each
    epoch (DanceGRPO, 2505.07818, whose code draws them per sample)."""

    fraction: float = 0.6

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"RandomSubset: fraction is {self.fraction}, expected above 0 and at most 1")

    def __call__(self, steps: int, epoch: int, seed: int) -> Schedule:
        every = range(_trainable(steps))
        count = max(1, int(len(every) * self.fraction))
        return Schedule(tuple(every), tuple(sorted(_draw(seed, epoch).sample(every, count))))


@dataclass(frozen=True)
class Single:
    """One given step draws noise and is trained, in every epoch."""

    step: int

    def __call__(self, steps: int, epoch: int, seed: int) -> Schedule:
        if not 0 <= self.step < _trainable(steps):
            raise ValueError(f"Single: step is {self.step}, expected 0 to {steps - 2} of {steps} steps")
        return Schedule((self.step,), (self.step,))


@dataclass(frozen=True)
class Sliding:
    """A window of `size` consecutive steps draws noise and is trained; the others are deterministic.

    MixGRPO (2507.21802) and its code; the random window of Flow-GRPO-Fast is
    Sliding(size=3, order="random", stop=0.5). The window's first step l runs from `start` to T-1-size, or to
    stop-size where `stop` keeps the window below that step; a `stop` below 1 is a share of the T steps. (The code's
    T-2 lets the window shrink and vanish.)

    order:
      "progressive"  l grows by `stride` after every `every` epochs;
      "decay"        after max(every_min, int(every*(1-p) + every_min*p)) epochs, p = l/(T-2);
      "exp_decay"    after ceil(every * exp(-rate * max(0, l-threshold))) epochs;
      "random"       l is drawn anew each epoch;
      "frozen"       l stays at `start`.
    After its last place the window goes back to `start`, or stays at the last with roll_back=False. Fields that an
    order does not name are not read.
    """

    size: int = 4
    stride: int = 1
    every: int = 25
    order: str = "progressive"
    start: int = 0
    stop: float | None = None
    roll_back: bool = True
    every_min: int = 1
    rate: float = 0.1
    threshold: int = 13

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"Sliding: order is {self.order!r}, expected one of {', '.join(ORDERS)}")
        for name, least in (("size", 1), ("stride", 1), ("every", 1), ("every_min", 1), ("start", 0), ("rate", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"Sliding: {name} is {getattr(self, name)}, expected {least} or more")

    def __call__(self, steps: int, epoch: int, seed: int) -> Schedule:
        first = self._first(steps, epoch, seed)
        window = tuple(range(first, first + self.size))
        return Schedule(window, window)

    def _first(self, steps: int, epoch: int, seed: int) -> int:
        last = self._last(steps)
        if self.order == "frozen":
            return self.start
        if self.order == "random":
            return _draw(seed, epoch).randint(self.start, last)
        places = list(range(self.start, last + 1, self.stride))
        if not self.roll_back and places[-1] < last:
            places.append(last)
        ends = list(accumulate(self._stay(place, steps) for place in places))
        if self.roll_back:
            epoch %= ends[-1]
        return places[min(bisect_right(ends, epoch), len(places) - 1)]

    def _last(self, steps: int) -> int:
        stop = steps if self.stop is None else int(self.stop * steps if self.stop < 1 else self.stop)
        limit = min(_trainable(steps), stop)
        if self.start + self.size > limit:
            raise ValueError(
                f"Sliding: a window of {self.size} from step {self.start} does not fit below step {limit} "
                f"of {steps} steps (the last is never trained): use a smaller window or more steps"
            )
        return limit - self.size

    def _stay(self, first: int, steps: int) -> int:
        """How many epochs the window stays at `first`."""
        if self.order == "decay":
            p = first / max(1, steps - 2)
            return max(self.every_min, int(self.every * (1 - p) + self.every_min * p))
        if self.order == "exp_decay":
            return math.ceil(self.every * math.exp(-self.rate * max(0, first - self.threshold)))
        return self.every


def _trainable(steps: int) -> int:
    """How many steps can be trained: all but the last."""
    if steps < 2:
        raise ValueError(f"steps is {steps}, expected 2 or more: the last one is never trained")
    return steps - 1


def _draw(seed: int, epoch: int) -> random.Random:
    return random.Random(f"{seed}/{epoch}")
