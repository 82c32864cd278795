"""Lockstep of sharded processes: all ranks make the same calls in the same order.

Where the shares of the processes differ, they agree on every call. Where they are equal, each makes its own calls, and
the processes agree once per part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import distributed

from flowgrpo.distributed.signals import Stopped

# Kinds of calls, the most urgent last. A look at a reference, with the LoRA off, goes before training, and the
# backward of a training forward goes before anything else. All of them run, and meet, at once.
DONE, TRAIN, LOOK, BACKWARD, RUN, MEET, LEAVE = range(7)


class Lockstep:
    """Lockstep of all processes: each announces its next call, and all run the most urgent one.

    accompany: given TRAIN or LOOK and a step, replays a row at that step; returns its output.
    """

    def __init__(self, device: torch.device, accompany: Callable[[int, int], torch.Tensor]):
        self.device, self.accompany = device, accompany
        self.beside: torch.Tensor | None = None  # the output of a row that accompanied a training forward
        self.left = False  # another process has left
        self.alike = False  # all make the same calls now, without a word

    def join(self, kind: int, step: int = 0) -> None:
        """Return when all processes do this.

        Raises Stopped if another process leaves.
        """
        if self.alike:
            return
        while (now := self._pressing(kind, step)) != (kind, step):
            self._follow(*now)
        self.beside = None

    def meet(self, value: int) -> bool:
        """Return True if all processes meet here with the same value.

        Raises Stopped if another process leaves.
        """
        calls = self._announced(MEET, value)
        if (LEAVE, 0) in calls:
            self._follow(LEAVE, 0)
        assert all(kind == MEET for kind, _ in calls), f"processes do not meet: {calls}"
        return min(calls) == max(calls)

    @contextmanager
    def in_step(self, value: int) -> Iterator[Callable[[int], object]]:
        """Context manager in which calls are not announced, if all processes make the same: `value` stands for them.

        Yields what all call before each part, with its number, so that one that leaves there leaves with the others. A
        process that fails within a part leaves alone: the others may wait in the denoiser, until `watch` ends them.
        """
        self.alike = self.meet(value)
        try:
            yield self.meet if self.alike else _unannounced
        except (Exception, GeneratorExit):  # the latter: an error ended the loop over the parts
            self.left = self.left or self.alike
            raise
        finally:
            self.alike = False

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
        calls = self._announced(kind, step)
        assert max(calls)[0] not in (RUN, MEET) or min(calls) == max(calls), f"processes do not sample alike: {calls}"
        return max(calls)

    def _announced(self, kind: int, step: int) -> list[tuple[int, int]]:
        """Return the calls that all processes announce, (kind, step) each."""
        call = torch.tensor([kind, step], device=self.device)
        gathered = [torch.empty_like(call) for _ in range(distributed.get_world_size())]
        distributed.all_gather(gathered, call)
        return [(kind, step) for kind, step in (tensor.tolist() for tensor in gathered)]


def _unannounced(number: int) -> None:
    """Do nothing before a part whose calls are announced one by one."""
