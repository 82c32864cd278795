"""Device memory of the epochs that `train.staleness` draws ahead."""

from __future__ import annotations

from flowgrpo.check.memory import Measured


def add(phases: dict[str, dict[str, int]], measured: Measured) -> None:
    """Add the recorded states of the epochs that wait to all phases."""
    for parts in phases.values():
        parts["epochs drawn ahead"] = measured.recorded * measured.config.train.staleness
