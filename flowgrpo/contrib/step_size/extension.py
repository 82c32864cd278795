"""Calibration of the learning rate: `train.lr: auto`.

The first updates of a run are measured. Adam's direction does not depend on the learning rate, so that a step is sized
by scaling the change of the weights: no sample and no gradient is lost, and the optimizer's moments stay as they are.
Then the mean factor of the second half of these updates is kept, and the schedule goes on.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from flowgrpo.contrib.step_size.signals import Reading, Signal, Tokens, Velocity
from flowgrpo.contrib.step_size.sizing import Calibration
from flowgrpo.errors import UserError
from flowgrpo.methods import targets
from flowgrpo.methods.setup import Setup
from flowgrpo.nouns import counted
from flowgrpo.storage.checkpoint import Tensors
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics
from flowgrpo.training.optimizer import rate
from flowgrpo.types import required

VELOCITY, NATS = 0.015, 0.2  # targets of images and clips, and of texts
STATES, COMPLETIONS = 12, 64  # that are replayed: of few completions, a few rare tokens are most of the signal


class StepSize(Extension):
    """Learning rate that the first updates find.

    calibration: its state. states: number of decisions that are replayed. kind: class of the signal.
    signal: of the present epoch, whose first update is `first`; reading: of its decisions under the weights before the
    next step. before: those weights.
    """

    name = "step_size"

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        settings = required(trainer.config.train.calibration)
        text = trainer.policy.modality == "text"
        target, states = (NATS, COMPLETIONS) if text else (VELOCITY, STATES)
        self.kind: type[Tokens] | type[Velocity] = Tokens if text else Velocity
        self.calibration = Calibration(settings.target or target, settings.updates, self.kind.reach)
        self.states = settings.states or states
        self.signal: Signal | None = None
        self.reading: Reading | None = None
        self.before: dict[str, Tensor] = {}
        self.first = 0

    @classmethod
    def require(cls, setup: Setup) -> None:
        """Raise UserError for a run whose steps cannot be sized."""
        config, method = setup.config, setup.method
        can = method.target.has_logp or isinstance(method.target, targets.NoisedFinals)
        wrong = {f"a method that trains {method.target.trains}": not can or config.preferences is not None,
                 f"train.warmup {config.train.warmup}, in whose place it stands": config.train.warmup > 0,
                 "phases that set train.lr": any("train.lr" in phase.set for phase in config.phases),
                 "memory.shard": bool(config.memory.shard),
                 "memory.context_parallel": config.memory.context_parallel > 1}
        for reason in (reason for reason, applies in wrong.items() if applies):
            raise UserError(f"train.lr is auto, which does not go with {reason}: set train.lr to a number, or leave "
                            "the other out")

    def on_credited(self, epoch: Epoch) -> None:
        """Choose the decisions that an epoch's updates are measured by."""
        self.signal, self.reading, self.first = None, None, self.trainer.optimization.update
        if self.calibration.ended:
            return
        own = [part for part in epoch.parts if part.weights is None]  # without those of earlier epochs
        self.signal = self.kind(self.trainer, own, epoch.conditioning, self.states)

    @torch.no_grad()
    def on_gradients(self, update: int) -> None:
        """Keep the weights before a step, and the reading under them."""
        self.before = {}
        if self.signal is None or self.calibration.ended:
            return
        if not any(each.grad is not None and each.grad.any() for each in self.trainer.optimization.parameters):
            self.reading = None  # what momentum alone does is no step to size
            return
        if self.reading is None:
            with self.trainer.processes.together():
                recorded = self.signal.recorded() if update == self.first else None
                self.reading = recorded or self.signal.read()
        self.before = {key: weight.detach().clone() for key, weight in self.trainer.policy.weights.named.items()}

    @torch.no_grad()
    def on_stepped(self) -> None:
        """Size the step, and the next one. Raises UserError if rounding is larger than the target."""
        if not self.before:
            return
        optimization, train = self.trainer.optimization, self.trainer.config.train
        left = rate(optimization.update - 1, optimization.total_updates, train)
        step, processes = Step(self.trainer.policy.weights.named, self.before), self.trainer.processes
        before, after, signal = required(self.reading), None, required(self.signal)

        def measure(factor: float) -> float:
            nonlocal after
            step.scale(factor)
            with processes.together():
                after = signal.read()
            sums = processes.gather(torch.tensor([signal.sums(before, after)], dtype=torch.float64)).sum(0)
            return signal.size(*sums.tolist()) if sums.isfinite().all() else math.inf

        if left > 0:
            self.calibration(measure, left, train.first_lr * self.calibration.scale)
            self._require_floor(signal.name)
            optimization.scale = self.calibration.scale
            if self.calibration.ended:
                self._tell(signal.name)
        self.reading, self.before = after, {}

    def _require_floor(self, name: str) -> None:
        """Raise UserError after the first update, whose step is sized; a large later one may flatten instead."""
        found = self.calibration
        if found.done == 1 and required(found.floor) > found.highest_floor:
            raise UserError(f"train.lr is auto, but only rounding gives a {name} of {found.floor:.2g}, expected at "
                            f"most {found.highest_floor:.2g}, {found.reach / 2:g} times the target: set precision: "
                            "fp32, or train.lr to a number")

    def _tell(self, name: str) -> None:
        found = self.calibration
        if self.trainer.processes.first:
            self.trainer.say(f"train.lr: {self.found:.3g} (auto: after {counted(found.done, 'update')}, {name} "
                             f"{found.moved:.2g} "
                             f"of {found.target:.2g} at the whole rate)")

    @property
    def found(self) -> float:
        """Learning rate before its schedule, as it is found so far."""
        return float(self.trainer.config.train.first_lr * self.calibration.scale)

    def on_trained(self, epoch: Epoch) -> Metrics:
        """Return the rate, and of a measured epoch its last signal and the floor."""
        known = self.calibration
        measured = {} if self.signal is None or known.floor is None else \
            {"step_size/moved": known.moved, "step_size/floor": known.floor}
        self.signal = self.reading = None
        return {"step_size/rate": self.found} | measured

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the calibration, for a checkpoint."""
        return {}, asdict(self.calibration)

    def load_state(self, tensors: Tensors, values: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; without any, begin anew."""
        known = {name: values[name] for name in ("scale", "floor", "done", "moved", "scales") if name in values}
        own = self.calibration
        self.calibration = Calibration(own.target, own.updates, own.reach, **known)
        self.trainer.optimization.scale = self.calibration.scale


class Step:
    """Last change of trained weights, which can be scaled."""

    def __init__(self, named: dict[str, torch.nn.Parameter], before: dict[str, Tensor]):
        self.named, self.before = named, before
        self.change = {key: (weight.detach() - before[key]).nan_to_num(0.0, 0.0, 0.0) for key, weight in named.items()}
        self.last = {key: weight.detach().clone() for key, weight in named.items()}

    def scale(self, factor: float) -> None:
        """Set the weights to those before, and the change times a factor; 1 gives those of the step, bit by bit."""
        for key, weight in self.named.items():
            weight.copy_(self.last[key] if factor == 1 else self.before[key] + factor * self.change[key])
