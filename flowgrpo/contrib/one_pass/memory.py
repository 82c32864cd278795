"""Device memory of the graphs that `train.one_pass` keeps from the rollout to the update."""

from __future__ import annotations

from flowgrpo.check.memory import Measured, planned
from flowgrpo.samplers.rollout import RolloutSpec


def add(phases: dict[str, dict[str, int]], measured: Measured) -> None:
    """Add the activations of all trained states to the phases, in the place of those of an update's micro-batch."""
    _, _, explorations = planned(measured.policy, measured.config, measured.conditioning)
    states = measured.config.train.prompts * sum(left(exploration) for exploration in explorations)
    for name in ("rollout", "decode", "update"):
        phases[name]["graphs of the rollout"] = measured.activations * states
    phases["update"]["activations"] = 0


def left(exploration: RolloutSpec) -> int:
    """Return the number of states of one prompt that a trained step leaves, each of which is evaluated once."""
    nodes, count = exploration.roots, 0
    for step in range(exploration.steps):
        count += nodes * (step in exploration.schedule.trained)
        nodes *= exploration.splits.get(step, 1)
    return count
