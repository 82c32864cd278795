"""Sharded weights: rows of a tensor's first dimension that lie on one process, as FSDP2 deals them out (a DTensor), and
the lockstep of the processes: all ranks make the same calls in the same order.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed

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
        """Wait until all processes do this. Raises Stopped if another process leaves."""
        if self.alike:
            return
        while (now := self._pressing(kind, step)) != (kind, step):
            self._follow(*now)
        self.beside = None

    def meet(self, value: int) -> bool:
        """True if all processes meet here with the same value. Raises Stopped if another process leaves."""
        calls = self._exchange_calls(MEET, value)
        if (LEAVE, 0) in calls:
            self._follow(LEAVE, 0)
        assert all(kind == MEET for kind, _ in calls), f"processes do not meet: {calls}"
        return min(calls) == max(calls)

    @contextmanager
    def in_step(self, value: int) -> Iterator[Callable[[int], object]]:
        """Context manager in which calls are not announced, if all processes make the same: `value` stands for them.
        Yields what all call before each part, with its number, where they may leave together. A process that fails
        within a part leaves alone: the others may wait in the denoiser, until `watch` ends them."""
        self.alike = self.meet(value)
        try:
            yield self.meet if self.alike else lambda number: None  # calls are announced one by one
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
        calls = self._exchange_calls(kind, step)
        assert max(calls)[0] not in (RUN, MEET) or min(calls) == max(calls), f"processes do not sample alike: {calls}"
        return max(calls)

    def _exchange_calls(self, kind: int, step: int) -> list[tuple[int, int]]:
        call = torch.tensor([kind, step], device=self.device)
        gathered = [torch.empty_like(call) for _ in range(distributed.get_world_size())]
        distributed.all_gather(gathered, call)
        return [(kind, step) for kind, step in (tensor.tolist() for tensor in gathered)]


def is_shard(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Rows [r,...] of this process, in the same memory; a whole tensor itself."""
    sharded: Any = tensor
    return sharded._local_tensor if is_shard(tensor) else tensor


def like(values: Tensor, parameter: Tensor) -> Tensor:
    """The rows `values` [r,...] of this process as a tensor that is sharded like the parameter."""
    from torch.distributed.tensor import DTensor

    model: Any = parameter
    return DTensor.from_local(values.to(local(parameter).device), model.device_mesh, model.placements,
                              shape=parameter.shape, stride=parameter.stride())


def rows(parameter: Tensor) -> slice:
    """The rows of this process among all those of a sharded parameter."""
    index, count, _ = place(parameter)
    size = -(-len(parameter) // count)
    return slice(min(index * size, len(parameter)), min((index + 1) * size, len(parameter)))


def place(parameter: Tensor) -> tuple[int, int, bool]:
    """(index of this process's shard, number of shards, True on the first process that holds this shard)."""
    mesh = parameter.device_mesh  # type: ignore[attr-defined]  # [shards], or [copies, shards]
    *copy, index = mesh.get_coordinate()
    return index, mesh.size(mesh.ndim - 1), not any(copy)
