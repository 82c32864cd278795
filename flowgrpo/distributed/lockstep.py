"""Lockstep of sharded processes: every rank makes the same calls in the same order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed

from flowgrpo.distributed.signals import Stopped

# What a process is about to do, the most pressing last. Who looks at a reference, with the LoRA off, comes before who
# trains; and what was begun by a training forward is ended by its backward before anything else.
DONE, TRAIN, LOOK, BACKWARD, RUN, LEAVE = range(6)


class Turns:
    """Has all processes run the same calls: each says what it is about to do, and what is most pressing is done by all.

    accompany: given TRAIN or LOOK and a step, replays a row at that step; returns its output.
    """

    def __init__(self, device: torch.device, accompany: Callable[[int, int], torch.Tensor]):
        self.device, self.accompany = device, accompany
        self.beside: torch.Tensor | None = None  # the output of a row that was run beside a training forward
        self.left = False  # whether somebody's leaving was heard

    def take(self, kind: int, step: int = 0) -> None:
        """Return when everyone does this. Stopped where another process leaves."""
        while (now := self._pressing(kind, step)) != (kind, step):
            self._follow(*now)
        self.beside = None

    def leave(self) -> None:
        """Tell the others that this process failed or was asked to stop, unless one of them said so first."""
        if not self.left:
            self._pressing(LEAVE, 0)
        self.left, self.beside = False, None

    def _follow(self, kind: int, step: int) -> None:
        if kind == LEAVE:
            self.left = True
            raise Stopped("another process failed or was asked to stop")
        if kind != BACKWARD:
            self.beside = self.accompany(kind, step)
            return
        self.beside.backward(torch.zeros_like(self.beside))
        self.beside = None

    def _pressing(self, kind: int, step: int) -> tuple[int, int]:
        """The most pressing of what all are about to do."""
        own = torch.tensor([kind, step], device=self.device)
        found = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(found, own)
        told = [tuple(each.tolist()) for each in found]
        assert max(told)[0] != RUN or min(told) == max(told), f"processes do not sample alike: {told}"
        return max(told)
