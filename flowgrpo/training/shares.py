"""Shares of an epoch's parts: those of each optimiser step, and the divisor of its loss."""

from __future__ import annotations

from flowgrpo.methods.parts import Reduction
from flowgrpo.objectives.reductions import TokenMean
from flowgrpo.samplers.rollout import Part


def decisions(parts: list[Part], reduction: Reduction = TokenMean()) -> int:
    """Return the divisor of one optimiser step's loss: its trained decisions, or its rows."""
    return sum(reduction.count(transitions.old.mask) for part in parts for transitions in part.transitions)


def chunks(parts: list[Part], count: int, first: int = 0, total: int | None = None) -> list[list[Part]]:
    """Distribute `parts` over at most `count` optimiser steps, as evenly as possible.

    Of `total` parts these are those from index `first` on: part i goes to step i % count.
    """
    steps = min(count, len(parts) if total is None else total)
    return [parts[(step - first) % count::count] for step in range(steps)]
