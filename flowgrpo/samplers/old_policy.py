"""Lagging old policy of forward-process methods: it draws the samples and is the "old" policy of the loss."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from flowgrpo.parts import part

Snapshot = dict[str, Tensor]


@part("lag")
class Lag:
    """Decay of the old policy: after every epoch its weights become d * old + (1 - d) * present, with d = min(start +
    slope * (optimizer updates done - after), most), `start` before `after` (DiffusionNFT, 2509.16117, its code).

    most: upper bound of d. 0 is no lag: the old policy is the present one of the rollout, and nothing is copied.
    draws: the old policy draws the rollouts; otherwise the present one does, and the old one is only compared with.

    Raises ValueError unless 0 <= start <= most <= 1, slope >= 0 and after >= 0.
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


class OldPolicy:
    """Old weights of a policy, `held` as they are in `epoch`, on the device if they are small; None without a lag.

    weights: the present ones, `TrainableWeights`. The factors A and B of a LoRA are averaged separately.
    updates: the number of optimizer updates of the run, set by the trainer.
    """

    updates = 0

    def __init__(self, lag: Lag, weights: Any):
        self.lag, self.weights = lag, weights
        self.held: Snapshot | None = None
        self.epoch = 0

    def start_epoch(self, epoch: int) -> None:
        """Update the old weights from the present ones at the start of an epoch; a repeated call in one epoch does
        nothing."""
        if not self.lag.most:
            return
        if self.held is None:
            self.held, self.epoch = self.weights.copy_for_average(), epoch
        if epoch > self.epoch:
            now, decay = self.weights.copy_for_average(), self.lag(self.updates)
            self.held, self.epoch = {key: now[key].lerp(old, decay) for key, old in self.held.items()}, epoch

    def old(self) -> AbstractContextManager:
        return contextlib.nullcontext() if self.held is None else self.weights.reference([self.held])

    def drawing(self) -> AbstractContextManager:
        """Context manager: use the policy that draws rollouts."""
        return self.old() if self.lag.draws else contextlib.nullcontext()

    def state(self) -> tuple[Snapshot, dict[str, Any]]:
        return self.held or {}, {"epoch": self.epoch}

    def load_state(self, tensors: Snapshot, values: dict[str, Any]) -> None:
        """Restore the old weights of a checkpoint; without any, start again from the present ones."""
        self.held = self.weights.place(tensors) or None
        self.epoch = values.get("epoch", 0)
