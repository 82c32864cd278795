"""torch's caching allocator of CUDA memory, by its rules for sizes: bytes in use and bytes reserved."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

ROUND = 512  # bytes to which a request is rounded up
SMALL = 2**20  # largest request that the small pool serves
SEGMENTS = (2 * 2**20, 20 * 2**20)  # bytes of a segment of the small pool, and of the large one
WHOLE = 10 * 2**20  # requests from here on get a segment of their own size, in steps of 2 MiB


@dataclass(eq=False)
class Block:
    """Part of a segment; before, behind: its neighbours there."""

    size: int
    small: bool
    number: int
    used: bool = False
    before: Block | None = None
    behind: Block | None = None


class Allocator:
    """Blocks in use and free. in_use: their bytes, as rounded; reserved: bytes of all segments, none given back."""

    def __init__(self) -> None:
        self.in_use = self.reserved = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # by pool, smallest first
        self._numbers = itertools.count()

    def take(self, size: int) -> Block:
        """Return a block for `size` bytes: the smallest free one that holds it, else one of a new segment."""
        size = max(-(-size // ROUND) * ROUND, ROUND)
        small = size <= SMALL
        free = self._free[small]
        place = bisect.bisect_left(free, (size, -1))
        block = free.pop(place)[2] if place < len(free) else self._segment(size, small)
        rest = block.size - size
        if rest >= ROUND if small else rest > SMALL:
            block.size = size
            tail = Block(rest, small, next(self._numbers), before=block, behind=block.behind)
            if tail.behind is not None:
                tail.behind.before = tail
            block.behind = tail
            self._keep(tail)
        block.used = True
        self.in_use += block.size
        return block

    def give(self, block: Block) -> None:
        """Free a block; it joins free neighbours of its segment."""
        block.used = False
        self.in_use -= block.size
        if block.before is not None and not block.before.used:
            block = self._joined(block.before, block, drop=block.before)
        if block.behind is not None and not block.behind.used:
            block = self._joined(block, block.behind, drop=block.behind)
        self._keep(block)

    def _segment(self, size: int, small: bool) -> Block:
        step = SEGMENTS[0]
        whole = SEGMENTS[not small] if small or size < WHOLE else -(-size // step) * step
        self.reserved += whole
        return Block(whole, small, next(self._numbers))

    def _joined(self, first: Block, second: Block, drop: Block) -> Block:
        free = self._free[drop.small]
        del free[bisect.bisect_left(free, (drop.size, drop.number))]
        first.size += second.size
        first.behind = second.behind
        if first.behind is not None:
            first.behind.before = first
        return first

    def _keep(self, block: Block) -> None:
        bisect.insort(self._free[block.small], (block.size, block.number, block))
