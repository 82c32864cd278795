"""Constraints of a run's rewards, whose multipliers move with every epoch (`training.scoring.Limits`)."""

from __future__ import annotations

from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension


class Constraints(Extension):
    """Multipliers of limited rewards. They are in the run's memory, so that a checkpoint has them."""

    def on_drawn(self, epoch: Epoch) -> None:
        epoch.metrics |= self.trainer.scoring.limits.learn(epoch.metrics)
