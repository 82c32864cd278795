"""Lockstep of sharded processes: all ranks make the same calls in the same order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed

from flowgrpo.distributed.signals import Stopped

# Kinds of calls, the most urgent last. A look at a reference, with the LoRA off, goes before training, and the
# backward of a training forward goes before anything else.
DONE, TRAIN, LOOK, BACKWARD, RUN, LEAVE = range(6)


class Lockstep:
    """Lockstep of all processes: each announces its next call, and all run the most urgent one.

    accompany: given TRAIN or LOOK and a step, replays a row at that step; returns its output.
    """

    def __init__(self, device: torch.device, accompany: Callable[[int, int], torch.Tensor]):
        self.device, self.accompany = device, accompany
        self.beside: torch.Tensor | None = None  # the output of a row that accompanied a training forward
        self.left = False  # another process has left

    def join(self, kind: int, step: int = 0) -> None:
        """Return when all processes do this.

        Raises Stopped if another process leaves.
        """
        while (now := self._pressing(kind, step)) != (kind, step):
            self._follow(*now)
        self.beside = None

    def abort(self) -> None:
        """Report to the others that this process failed or was asked to stop, unless one of them did first."""
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
        assert self.beside is not None, "a backward pass without its forward"
        self.beside.backward(torch.zeros_like(self.beside))
        self.beside = None

    def _pressing(self, kind: int, step: int) -> tuple[int, int]:
        """Return the most urgent of the announced calls, (kind, step)."""
        call = torch.tensor([kind, step], device=self.device)
        gathered = [torch.empty_like(call) for _ in range(distributed.get_world_size())]
        distributed.all_gather(gathered, call)
        calls = [tuple(tensor.tolist()) for tensor in gathered]
        assert max(calls)[0] != RUN or min(calls) == max(calls), f"processes do not sample alike: {calls}"
        return max(calls)
