"""State that a part keeps from epoch to epoch, by prompt: JSON-able, in the memory of its context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from flowgrpo.advantages.group import RELATIVE_NOISE
from flowgrpo.errors import UserError


def remembered(memory: dict[str, Any], part: str, key: str, epoch: int, start: list[float],
               change: Callable[[list[float]], list[float]]) -> tuple[list[float], list[float]]:
    """Return the state of a key before this epoch, and with it.

    memory[part] holds the states, which begin as `start`. The first call of an epoch changes them; later ones, for the
    inner nodes of a tree or after a resume, return the same.
    """
    states = memory.setdefault(part, {})
    entry = states.get(key, {"epoch": None, "after": start})
    if entry["epoch"] != epoch:
        entry = states[key] = {"epoch": epoch, "before": entry["after"], "after": change(entry["after"])}
    return entry["before"], entry["after"]


def mean_of(counts: Sequence[float]) -> float:
    """Return the mean of a state [number, sum, ...]; 0 of no number."""
    return counts[1] / counts[0] if counts[0] else 0.0


def require_rates(part: str, total: Tensor) -> None:
    """Raise UserError for rewards [P, G] outside 0 to 1, which are no success rates."""
    if (total < -RELATIVE_NOISE).any() or (total > 1 + RELATIVE_NOISE).any():
        known = total[~total.isnan()]
        raise UserError(f"{part}: rewards from {known.min().item():g} to {known.max().item():g}, expected within 0 "
                        "to 1, as a success rate: scale the weights, or shape the rewards first")
