"""Calibration of the learning rate: `train.lr: auto`.

The first updates of a run are measured. Adam's direction does not depend on the learning rate, so that a step is sized
by scaling the change of the weights: no sample and no gradient is lost, and the optimizer's moments stay as they are.
Then the mean factor of the second half of these updates is kept, and the schedule goes on.

`step_factor` sizes a step. Its signal s is linear in a small step. Rounding adds a floor f that hardly depends on the
step, so that what is read is sqrt(s^2 + f^2): a step is read at several times its size.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from statistics import geometric_mean
from typing import Any, cast

import torch
from torch import Tensor

from flowgrpo.contrib.features import PhaseKeys
from flowgrpo.contrib.step_size.signals import Reading, Tokens, Velocity
from flowgrpo.errors import UserError
from flowgrpo.methods import targets
from flowgrpo.methods.setup import Setup, require_compatible
from flowgrpo.nouns import quantity
from flowgrpo.storage.checkpoint import Tensors
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics
from flowgrpo.training.optimizer import rate
from flowgrpo.types import unwrap

Measure = Callable[[float], float]  # what is read of the present step, multiplied by a factor

NEAR = 1.25  # a step is sized once its signal is within this factor of the target
TRIES = 16  # replays that size one step at most
SHRINK, GROW = 1e-2, 1e3  # factors of one try
LOWEST = 0.3  # of the target: a smaller signal is taken for that
SPIKE = 3.0  # a later step is cut where its signal is that many times the target
FASTEST = 2.0  # factor by which one later update changes the rate
HIGHEST = 1.0  # learning rate at most


def step_factor(signal: Measure, target: float, most: float = math.inf, known: float | None = None
                ) -> tuple[float, float]:
    """Factor of a step with which its signal is the target, and this signal.

    A factor is scaled by what its signal lacks until the target is between the signals of two factors; then it is
    interpolated, since a signal that grows with the square of the step would jump from side to side for ever.
    most: bound of the factor. known: the signal of the step as it is.
    """
    factor, found = 1.0, signal(1.0) if known is None else known
    below, above = (0.0, 0.0), (math.inf, math.inf)  # nearest factors with smaller and larger signals, with these
    for _ in range(TRIES):
        if math.isfinite(found) and target / NEAR <= found <= target * NEAR:
            break
        if found < target:
            below = factor, found
        else:
            above = factor, found
        if 0 < below[0] < above[0] < math.inf:
            change = _crossing(below, above, target) / factor
        else:
            change = SHRINK if not math.isfinite(found) else min(max(target / max(found, 1e-12), SHRINK), GROW)
        if factor * change > most:
            change = most / factor
        if change == 1:
            break
        factor *= change
        found = signal(factor)
    return factor, found


def _crossing(below: tuple[float, float], above: tuple[float, float], target: float) -> float:
    """Factor at which the line through two (factor, signal), in logarithms, is the target; their geometric mean where
    it has no line."""
    (low, small), (high, large) = below, above
    share = math.log(target / small) / math.log(large / small) if small > 0 and math.isfinite(large) else 0.5
    return low * (high / low)**share


@dataclass
class Calibration:
    """State of a calibration. target: of the signal, at the whole rate. reach: factor at which a step is read.

    scale: factor of the learning rate so far. floor: of rounding, in the last update; None before the first one. done:
    updates that were measured. moved: the signal of the last one, over what the schedule leaves of the rate. scales:
    behind the second half of the updates; their geometric mean is kept, since one reading is noisy.
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
    def is_finished(self) -> bool:
        return self.done >= self.updates

    @property
    def highest_floor(self) -> float:
        """Half of what is read of the target: above it a reading is rounding for a good part."""
        return self.target * self.reach / 2

    def __call__(self, measure: Measure, left: float, rate: float) -> float:
        """Size an update, and the rate of the next; return the factor of its step.

        left: of the learning rate by its schedule, at this update. rate: the learning rate of the step, without it.

        The first step is scaled until it moves the target. A later one is scaled only if it is a spike; else it
        corrects the rate of the next one by half of its error, in logarithms. The last reading is of the step itself:
        what it has more than the signal is rounding.
        """
        target, most = self.target * left, HIGHEST / rate

        def read(factor: float) -> float:
            return measure(self.reach * factor) / self.reach

        known = None if self.floor is None else read(1.0)
        if known is not None and math.isfinite(known) and \
                known <= SPIKE * max(target, 2 * unwrap(self.floor) / self.reach):
            factor, signal, scaled = 1.0, known, False
        else:
            factor, signal, scaled = *step_factor(read, target, most, known), True
        self.floor = math.sqrt(max(measure(factor)**2 - signal**2, 0.0))
        if scaled:
            self.scale, self.moved = self.scale * factor, self.target
        elif target * self.reach > self.floor:  # else the schedule has left nothing that can be read
            moved = max(signal, LOWEST * target)
            self.moved = self.target * moved / target
            self.scale *= min(max((target / moved)**0.5, 1 / FASTEST), FASTEST, most)
        self.done += 1
        if self.done > self.updates // 2:
            self.scales.append(self.scale)
        if self.is_finished:
            self.scale = geometric_mean(self.scales)
        return factor


VELOCITY, NATS = 0.015, 0.2  # targets of images and clips, and of texts
STATES, COMPLETIONS = 12, 64  # that are replayed: of few completions, a few rare tokens are most of the signal


class StepSize(Extension):
    """Learning rate that the first updates find. states: number of decisions that are replayed. signal: of the present
    epoch, whose first update is `first`; reading: of its decisions under `before`, the weights before the next step."""

    name = "step_size"

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        settings = unwrap(trainer.config.train.calibration)
        text = trainer.policy.unit == "tokens"
        target, states = (NATS, COMPLETIONS) if text else (VELOCITY, STATES)
        self.kind: type[Tokens] | type[Velocity] = Tokens if text else Velocity
        self.calibration = Calibration(settings.target or target, settings.updates, self.kind.reach)
        self.states = settings.states or states
        self.signal: Velocity | Tokens | None = None
        self.reading: Reading | None = None
        self.before: dict[str, Tensor] = {}
        self.first = 0

    @classmethod
    def require(cls, setup: Setup) -> None:
        config, method = setup.config, setup.method
        can = method.target.has_logp or isinstance(method.target, targets.NoisedFinals)
        wrong = {f"a method that trains {method.target.trains}": not can or config.preferences is not None,
                 f"train.warmup {config.train.warmup}, in whose place it stands": config.train.warmup > 0,
                 "phases that set train.lr": any("train.lr" in phase.set for phase in PhaseKeys.read(config).phases),
                 "memory.shard": bool(config.memory.shard),
                 "memory.context_parallel": config.memory.context_parallel > 1}
        require_compatible("train.lr is auto", wrong, ": set train.lr to a number, or leave the other out")

    def on_credited(self, epoch: Epoch) -> None:
        """Choose the decisions that an epoch's updates are measured by."""
        self.signal, self.reading, self.first = None, None, self.trainer.optimization.update
        if self.calibration.is_finished:
            return
        own = [part for part in epoch.parts if part.weights is None]  # without those of earlier epochs
        self.signal = self.kind(self.trainer, own, epoch.conditioning, self.states)

    @torch.no_grad()
    def on_gradients(self, update: int) -> None:
        """Keep the weights before a step, and the reading under them."""
        self.before = {}
        if self.signal is None or self.calibration.is_finished:
            return
        if not any(each.grad is not None and each.grad.any() for each in self.trainer.optimization.parameters):
            self.reading = None  # what momentum alone does is no step to size
            return
        if self.reading is None:
            with self.trainer.processes.collective():
                recorded = self.signal.rollout_reading() if update == self.first else None
                self.reading = recorded or self.signal.read()
        self.before = {key: weight.detach().clone() for key, weight in self.trainer.policy.weights.named.items()}

    @torch.no_grad()
    def on_stepped(self) -> None:
        """Size the step, and the next one. Raises UserError if rounding is larger than the target."""
        if not self.before:
            return
        optimization, train = self.trainer.optimization, self.trainer.config.train
        left = rate(optimization.update - 1, optimization.total_updates, train)
        named, own, processes = self.trainer.policy.weights.named, self.before, self.trainer.processes
        last = {key: weight.detach().clone() for key, weight in named.items()}
        change = {key: (value - own[key]).nan_to_num(0.0, 0.0, 0.0) for key, value in last.items()}
        before, after, signal = unwrap(self.reading), None, cast(Velocity | Tokens, self.signal)

        def measure(factor: float) -> float:
            nonlocal after
            # Those before and the change times the factor; 1 gives those of the step, bit by bit.
            for key, weight in named.items():
                weight.copy_(last[key] if factor == 1 else own[key] + factor * change[key])
            with processes.collective():
                after = signal.read()
            sums = processes.gather(torch.tensor([signal.sums(before, after)], dtype=torch.float64)).sum(0)
            return signal.size(*sums.tolist()) if sums.isfinite().all() else math.inf

        if left > 0:
            self.calibration(measure, left, train.first_lr * self.calibration.scale)
            found = self.calibration
            # Of the first update, whose step is sized; a large later floor may flatten instead.
            if found.done == 1 and unwrap(found.floor) > found.highest_floor:
                raise UserError(f"train.lr is auto, but only rounding gives a {signal.name} of {found.floor:.2g}, "
                                f"expected at most {found.highest_floor:.2g}, {found.reach / 2:g} times the target: "
                                "set precision: fp32, or train.lr to a number")
            optimization.scale = self.calibration.scale
            if found.is_finished and self.trainer.processes.first:
                self.trainer.log(f"train.lr: {self.base_rate:.3g} (auto: after {quantity(found.done, 'update')}, "
                                 f"{signal.name} {found.moved:.2g} of {found.target:.2g} at the whole rate)")
        self.reading, self.before = after, {}

    @property
    def base_rate(self) -> float:
        """Learning rate before its schedule, as it is found so far."""
        return float(self.trainer.config.train.first_lr * self.calibration.scale)

    def on_trained(self, epoch: Epoch) -> Metrics:
        known = self.calibration
        measured = {} if self.signal is None or known.floor is None else \
            {"step_size/moved": known.moved, "step_size/floor": known.floor}
        self.signal = self.reading = None
        return {"step_size/rate": self.base_rate} | measured

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        return {}, asdict(self.calibration)

    def load_state(self, tensors: Tensors, values: dict[str, Any]) -> None:
        known = {name: values[name] for name in ("scale", "floor", "done", "moved", "scales") if name in values}
        self.calibration = replace(self.calibration, **known)
        self.trainer.optimization.scale = self.calibration.scale
