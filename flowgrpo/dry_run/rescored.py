"""Epochs of a dry run with `train.staleness`: drawn as ever, and scored again as those that older weights drew."""

from __future__ import annotations

from typing import Any

from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.rollouts.base import Encoded
from flowgrpo.samplers.rollout import Part
from flowgrpo.training.ahead import Ahead, Drawn


class Rescored:
    """Stand-in for a run's `ahead`: no thread, and no queue, whose bytes are counted beside the epoch."""

    def __init__(self, ahead: Ahead):
        self.ahead = ahead

    def draw(self) -> tuple[EpochBatch, list[Part], Encoded]:
        """Draw an epoch and score its parts with the weights before the update."""
        run: Any = self.ahead.run
        epoch_batch, parts, conditioning = run.draw()
        drawn = Drawn(run.epoch, run.epoch - 1, 0, epoch_batch.prompts, parts, conditioning=conditioning)
        return epoch_batch, self.ahead.decoupled(drawn), conditioning

    def metrics(self) -> dict[str, float]:
        """Return nothing: there are no values."""
        return {}
