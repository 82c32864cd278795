"""Epochs of a dry run with `train.staleness`: drawn as ever, and scored again as those that older weights drew."""

from __future__ import annotations

from flowgrpo.contrib.staleness.extension import Drawn, Staleness
from flowgrpo.training import sampling
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Extensions


class Rescored(Extension):
    """Stand-in for `Staleness`: no thread, and no queue, whose bytes are counted beside the epoch."""

    def __init__(self, staleness: Staleness):
        super().__init__(staleness.trainer)
        self.staleness = staleness

    def draw_epoch(self) -> Epoch:
        """Draw an epoch and score its parts with the weights before the update."""
        trainer, epoch = self.trainer, sampling.draw(self.trainer)
        drawn = Drawn(trainer.epoch, trainer.epoch - 1, 0, epoch.groups.prompts, epoch.own, epoch.parts,
                      conditioning=epoch.conditioning)
        epoch.parts = self.staleness.decoupled(drawn)
        return epoch


def stand_in(extensions: Extensions) -> None:
    """Put the stand-in in the place of a run's staleness, if it has any."""
    extensions.present = [Rescored(each) if isinstance(each, Staleness) else each for each in extensions.present]
