"""Comparisons of a judge of pairs within a group."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Pairing:
    """Comparisons within a group.

    both_orders: judge every pair twice, with each of the two first once, and average. This cancels a judge's position
    bias, at twice the calls.
    comparisons: pairs per group. None, or a number of at least all G (G-1) / 2: all; fewer are drawn so that every
    sample is compared equally often.
    seed: of that draw.
    """

    both_orders: bool = False
    comparisons: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.comparisons is not None and self.comparisons < 1:
            raise ValueError(f"comparisons is {self.comparisons}, expected 1 or more, or None for all pairs")

    def pairs(self, group: int, prompt: str = "") -> list[tuple[int, int]]:
        """Return (first, second) of every comparison in a group, a regular tournament that is fixed per prompt.

        The samples are shuffled into a ring. Each meets its nearest neighbours, as first on one side and as second on
        the other, so that position bias harms all equally. Only for an odd number of opponents, one across the ring is
        met in one position.
        Raises ValueError for `comparisons` that are not regular.
        """
        degree = 2 * self._count(group) // group
        ring = random.Random(f"{self.seed}/{prompt}").sample(range(group), group)
        pairs = [(ring[i], ring[(i + away) % group]) for away in range(1, degree // 2 + 1) for i in range(group)]
        return pairs + [(ring[i], ring[i + group // 2]) for i in range(group // 2 if degree % 2 else 0)]

    def _count(self, group: int) -> int:
        every, unit = group * (group - 1) // 2, group if group % 2 else group // 2
        count = every if self.comparisons is None else min(self.comparisons, every)
        if rest := count % unit:
            nearest = [n for n in (count - rest, count - rest + unit) if n]
            raise ValueError(f"comparisons is {count}, but every sample of a group of {group} is compared equally "
                             f"often: expected {' or '.join(map(str, nearest))}")
        return count
