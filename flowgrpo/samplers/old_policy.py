"""The lagging policy of forward-process methods: whose samples are trained on, and what a loss calls old."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Snapshot = dict[str, Tensor]


@dataclass(frozen=True)
class Lag:
    """How slowly the old policy follows: after every epoch its weights become d * old + (1 - d) * present, with
    d = min(start + slope * (optimiser updates done - after), most), `start` before `after` (DiffusionNFT, 2509.16117,
    its code).

    most 0 is no lag at all: the old policy is the present one of the rollout, and nothing is copied. draws: rollouts
    are the old policy's; otherwise the present one draws them, and the old one is only compared with.
    """

    start: float = 0.0
    slope: float = 0.0
    after: int = 0
    most: float = 0.0
    draws: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.most <= 1 or not self.slope >= 0 or self.after < 0:
            raise ValueError(f"Lag: start is {self.start}, most {self.most}, slope {self.slope} and after "
                             f"{self.after}, expected 0 <= start <= most <= 1, and 0 or more")

    def __call__(self, updates: int) -> float:
        return min(self.start + self.slope * max(updates - self.after, 0), self.most)


class Lagging:
    """A policy's old weights, `held` on the CPU as they are in `epoch`; None without a lag.

    weights: `trainable.Weights`, the present ones. Of a LoRA the factors A and B follow, each by itself. updates: how
    many optimiser updates the run has made, told by whoever counts them.
    """

    updates = 0

    def __init__(self, lag: Lag, weights: Any):
        self.lag, self.weights = lag, weights
        self.held: Snapshot | None = None
        self.epoch = 0

    def begin(self, epoch: int) -> None:
        """Follow the present weights, those at the start of an epoch; once per epoch, however often it is begun."""
        if not self.lag.most:
            return
        if self.held is None:
            self.held, self.epoch = self.weights.snapshot(), epoch
        if epoch > self.epoch:
            decay = self.lag(self.updates)
            self.held = {key: now.lerp(self.held[key], decay) for key, now in self.weights.snapshot().items()}
            self.epoch = epoch

    def old(self) -> AbstractContextManager:
        """Inside, the policy is the old one."""
        return contextlib.nullcontext() if self.held is None else self.weights.reference([self.held])

    def drawing(self) -> AbstractContextManager:
        """Inside, the policy is the one that rollouts are drawn from."""
        return self.old() if self.lag.draws else contextlib.nullcontext()

    def restore(self, held: Snapshot, epoch: int) -> None:
        """Go on from a checkpoint; from one without old weights, with the present ones."""
        self.held, self.epoch = held or None, epoch
