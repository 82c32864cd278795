"""Plans: the steps of a rollout that draw noise, split and are trained, `plan(steps, epoch, seed) -> Schedule`.

A plan that explores a prompt in several ways in one epoch returns a tuple of schedules. A plan is a pure function of
its arguments, so a resumed run needs no state. Steps are grid indices 0 to T-1 (T = `steps`). No plan draws noise on
the last step, T-1: noise added there stays in the sample as grain, and its deviation can vanish.
Raises ValueError for settings that leave nothing to train; NoSteps is for methods that train something else.

A plan may say which steps draw noise, however many there are: its `noisy` is "every" where all of them or all but the
last do, and "none" where none does.
"""

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

from flowgrpo.parts import Above, AtLeast, OneOf, part

ORDERS = ("progressive", "random", "decay", "exp_decay", "frozen")


@dataclass(frozen=True)
class Schedule:
    """Stochastic and trained steps of one rollout.

    stochastic: steps that draw noise, sorted.
    trained: the trained ones among them, sorted; at least one if any step draws noise.
    children: number of children of every state at each stochastic step, 1 for no split; empty: the group splits at the
        first.
    noise: factors on the kernel's noise, one per stochastic step; empty: 1.
    """

    stochastic: tuple[int, ...]
    trained: tuple[int, ...]
    children: tuple[int, ...] = ()
    noise: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("children", "noise"):
            given = getattr(self, name)
            if given and (len(given) != len(self.stochastic) or min(given) <= 0):
                raise ValueError(f"{name} is {given}, expected {len(self.stochastic)} numbers above 0, one per "
                                 "stochastic step")
        for name in ("stochastic", "trained"):
            steps = getattr(self, name)
            if not steps and self.stochastic or list(steps) != sorted(set(steps)) or min(steps, default=0) < 0:
                raise ValueError(f"{name} steps are {steps}, expected at least one, sorted, from 0 up")
        if extra := sorted(set(self.trained) - set(self.stochastic)):
            raise ValueError(f"steps {extra} are trained but add no noise: add them to the stochastic steps")


@part("plan", noisy="every")
class AllSteps:
    """Every step but the last adds noise and is trained (Flow-GRPO, 2505.05470)."""

    def __call__(self, steps: int, epoch: int, seed: int) -> Schedule:
        every = tuple(range(_trainable(steps)))
        return Schedule(every, every)


@part("plan", noisy="every")
class RandomSubset:
    """Random share of the steps is trained: int((T-1) * fraction), at least one, drawn anew each epoch; every step but
    the last adds noise (DanceGRPO, 2505.07818, whose code draws them per sample)."""

    fraction: Annotated[float, Above(0, to=1, words="above 0 and at most 1")] = 0.6

    def __call__(self, steps: int, epoch: int, seed: int) -> Schedule:
        every = range(_trainable(steps))
        count = max(1, int(len(every) * self.fraction))
        return Schedule(tuple(every), tuple(sorted(_draw(seed, epoch).sample(every, count))))


@part("plan", noisy="none")
class NoSteps:
    """No step adds noise or is trained: rollouts by the solver alone, for methods that train on noised finals
    (`times`)."""

    def __call__(self, steps: int, epoch: int, seed: int) -> Schedule:
        return Schedule((), ())


@part("plan")
class Single:
    """One given step adds noise and is trained, in every epoch."""

    step: int

    def __call__(self, steps: int, epoch: int, seed: int) -> Schedule:
        if not 0 <= self.step < _trainable(steps):
            raise ValueError(f"Single: step is {self.step}, expected 0 to {steps - 2} of {steps} steps")
        return Schedule((self.step,), (self.step,))


@part("plan")
class EachStep:
    """Each step below `stop` in turn adds noise and is trained, on a shared ODE prefix: one schedule per step
    (TempFlow-GRPO, 2508.04324, all but the last; G2RPO, 2510.01982, the first half: stop=0.5).

    stop below 1 is a share of the T steps; None takes every step but the last.
    """

    stop: float | None = None

    def __call__(self, steps: int, epoch: int, seed: int) -> tuple[Schedule, ...]:
        return tuple(Schedule((step,), (step,)) for step in range(max(1, _limit(steps, self.stop))))


@part("plan", noisy="every", jointly={"branch every pruned": "2 or more, 1 or more, and 0 or more"})
class Branches:
    """Tree whose states have `branch` children at the steps `splits`; every step but the last adds noise
    (BranchGRPO, 2509.06040: 16 leaves of splits 0, 3, 6, 9 of 20 steps).

    Depth pruning: `pruned` consecutive steps are sampled and not trained. They start as the last ones and move up by
    one after every `every` epochs. They stop when they begin at the last split (as in the released code).
    """

    splits: tuple[int, ...] = (0, 3, 6, 9)
    branch: Annotated[int, AtLeast(2)] = 2
    pruned: Annotated[int, AtLeast(0)] = 0
    every: Annotated[int, AtLeast(1)] = 30

    def __post_init__(self) -> None:
        if list(self.splits) != sorted(set(self.splits)) or not self.splits or self.splits[0] < 0:
            raise ValueError(f"Branches: splits are {self.splits}, expected rising steps from 0 up")

    def __call__(self, steps: int, epoch: int, seed: int) -> Schedule:
        every = tuple(range(_trainable(steps)))
        if self.splits[-1] not in every:
            raise ValueError(f"Branches: a split at step {self.splits[-1]} of {steps} steps: the last is never split")
        children = tuple(self.branch if step in self.splits else 1 for step in every)
        last = len(every) - self.pruned
        if last < 1:
            raise ValueError(f"Branches: pruned is {self.pruned}, expected at most {len(every) - 1} of {steps} steps: "
                             "one has to be trained, and the last never is")
        start = max(last - epoch // self.every, min(last, self.splits[-1]))
        return Schedule(every, every[:start] + every[start + self.pruned:], children)


@part("plan", noisy="every")
class GrowingTail:
    """Tail of trained steps that grows: every step but the last adds noise, the last n before it are trained, and every
    state splits into `branch` at the first trained step (B2-DiffuRL, 2503.11240, backward progressive training).

    n grows from `first` to `final` shares of the steps over `stages` epochs (14 to 20 of 20 steps over 100 there).
    """

    branch: int = 4
    first: float = 0.7
    final: float = 1.0
    stages: int = 100

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.final <= 1 or self.branch < 2 or self.stages < 1:
            raise ValueError(f"GrowingTail: first is {self.first}, final {self.final}, branch {self.branch} and stages "
                             f"{self.stages}, expected 0 < first <= final <= 1, 2 or more, 1 or more")

    def __call__(self, steps: int, epoch: int, seed: int) -> Schedule:
        every = tuple(range(_trainable(steps)))
        share = self.first + (self.final - self.first) * min(epoch / self.stages, 1)
        start = len(every) - max(1, int(len(every) * share))
        return Schedule(every, every[start:], tuple(self.branch if step == start else 1 for step in every))


@part("plan", noisy="every")
class LastSteps:
    """Every step adds the SDE step's noise, and the last `count` are trained as one, for methods with `backprop`, whose
    graph begins at the first of them (DRaFT-K, 2309.17400: K = 1).

    Such methods draw no noise at the last step.
    """

    count: Annotated[int, AtLeast(1)] = 1

    def __call__(self, steps: int, epoch: int, seed: int) -> Schedule:
        if self.count > steps:
            raise ValueError(f"LastSteps: count is {self.count}, expected at most the {steps} steps")
        return Schedule(tuple(range(steps)), (steps - self.count,))


@part("plan", noisy="every")
class RandomLast:
    """`LastSteps` with a count sampled anew each epoch from a normal distribution, as shares of the steps, clipped to 1
    to all of them (AlignProp, 2310.03739, released code: the graph begins at N(42, 5) of 50 steps)."""

    mean: float = 0.16
    deviation: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.mean <= 1 or not 0 <= self.deviation <= 1:
            raise ValueError(f"RandomLast: mean is {self.mean} and `deviation` {self.deviation}, expected above 0 and "
                             "at most 1, and 0 to 1")

    def __call__(self, steps: int, epoch: int, seed: int) -> Schedule:
        drawn = _draw(seed, epoch).gauss(self.mean * steps, self.deviation * steps)
        return LastSteps(min(max(round(drawn), 1), steps))(steps, epoch, seed)


@part("plan", noisy="every")
class LateStep:
    """`LastSteps` that begin at a step chosen anew each epoch, uniformly from the share `first` of the steps on (ReFL,
    2304.05977: 30 to 39 of 40)."""

    first: Annotated[float, AtLeast(0, below=1, words="0 or more, and below 1")] = 0.75

    def __call__(self, steps: int, epoch: int, seed: int) -> Schedule:
        begin = _draw(seed, epoch).randint(int(self.first * steps), steps - 1)
        return LastSteps(steps - begin)(steps, epoch, seed)


@part("plan")
class Sliding:
    """Sliding window of `size` consecutive steps that add noise and are trained; the others are deterministic.

    MixGRPO (2507.21802) and its code; the random window of Flow-GRPO-Fast is Sliding(size=3, order="random", stop=0.5).
    The window's first step l runs from `start` to T-1-size, or to stop-size if `stop` keeps the window below that step.
    A `stop` below 1 is a share of the T steps. (The code's T-2 lets the window shrink and vanish.)

    order:
      "progressive"  l grows by `stride` after every `every` epochs;
      "decay"        after max(every_min, int(every*(1-p) + every_min*p)) epochs, p = l/(T-2);
      "exp_decay"    after ceil(every * exp(-rate * max(0, l-threshold))) epochs;
      "random"       l is drawn anew each epoch;
      "frozen"       l stays at `start`.
    After its last place the window returns to `start`, or stays there with roll_back=False. An order ignores the fields
    that it does not name.
    """

    size: Annotated[int, AtLeast(1)] = 4
    stride: Annotated[int, AtLeast(1)] = 1
    every: Annotated[int, AtLeast(1)] = 25
    order: Annotated[str, OneOf(ORDERS)] = "progressive"
    start: Annotated[int, AtLeast(0)] = 0
    stop: float | None = None
    roll_back: bool = True
    every_min: Annotated[int, AtLeast(1)] = 1
    rate: Annotated[float, AtLeast(0)] = 0.1
    threshold: int = 13

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
        stays = [self.every] * len(places)  # epochs at each place
        if self.order == "decay":
            shares = [place / max(1, steps - 2) for place in places]
            stays = [max(self.every_min, int(self.every * (1 - p) + self.every_min * p)) for p in shares]
        if self.order == "exp_decay":
            stays = [math.ceil(self.every * math.exp(-self.rate * max(0, place - self.threshold))) for place in places]
        ends = list(accumulate(stays))
        if self.roll_back:
            epoch %= ends[-1]
        return places[min(bisect_right(ends, epoch), len(places) - 1)]

    def _last(self, steps: int) -> int:
        limit = _limit(steps, self.stop)
        if self.start + self.size > limit:
            raise ValueError(
                f"Sliding: a window of {self.size} from step {self.start} does not fit below step {limit} "
                f"of {steps} steps (the last is never trained): use a smaller window"
                + (f" (parts: {{plan: {{size: {limit - self.start}}}}})" if limit > self.start else "")
                + ", more steps, or a method that trains every step (flow_grpo, ddpo; of consistency models rlcm)")
        return limit - self.size


@part("plan")
class TreeWindow:
    """Tree inside a window: each step of the window splits every state into `branch`; the others are deterministic
    (Dynamic-TreeRPO, 2509.23352: depth 4, binary).

    window: its position; its size is the tree's depth.
    growth: the noise of depth k of d is (1 + growth*k/d) times the kernel's (a reconstruction: the paper's equation 6
        could not be read in full).
    """

    window: Sliding = Sliding(size=4)
    branch: int = 2
    growth: float = 0.0

    def __call__(self, steps: int, epoch: int, seed: int) -> Schedule:
        window = self.window(steps, epoch, seed).stochastic
        noise = tuple(1 + self.growth * depth / len(window) for depth in range(len(window)))
        return Schedule(window, window, (self.branch,) * len(window), noise)


def _trainable(steps: int) -> int:
    if steps < 2:
        raise ValueError(f"steps is {steps}, expected 2 or more: the last one is never trained")
    return steps - 1


def _limit(steps: int, stop: float | None) -> int:
    """Step below which a plan stays: `stop`, a share of the steps if below 1; by default all but the last."""
    return min(_trainable(steps), steps if stop is None else int(stop * steps if stop < 1 else stop))


def _draw(seed: int, epoch: int) -> random.Random:
    return random.Random(f"{seed}/{epoch}")
