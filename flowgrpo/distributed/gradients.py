"""Sums of the gradients of all processes, once per optimizer step: in one call, as of a LoRA, or in buckets."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed

from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.signals import Stopped

BUCKET = 25 * 2**20  # bytes of a call, as of DDP's


class GradientSum:
    """Sum in one call behind the backward.

    once: shards are reduced in a step's last backward alone; a resumed run goes on with it. None: not decided.
    """

    once: bool | None = None

    def __init__(self, processes: Processes, parameters: Sequence[torch.nn.Parameter]):
        self.processes, self.parameters = processes, list(parameters)

    def step(self) -> AbstractContextManager[None]:
        """Context manager around a step's backwards, inside `Processes.collective`."""
        return nullcontext()

    def before_backward(self, last: bool) -> None:
        """Prepare for a backward. last: no other of this process follows in the step."""

    def finish(self, log: Callable[[str], None]) -> None:
        """Give every parameter the sum of its gradients; one that got none anywhere keeps none."""
        self.processes.add_gradients(self.parameters)


class Buckets(GradientSum):
    """Sum in calls of BUCKET bytes, two of which are on their way at most.

    A bucket has ranges of gradients, flat in fp32, those of the last parameters first: a backward reaches them in about
    that order. It is sent after those before it, so that all processes send alike, when its parameters have their
    gradients: within the step's last backward with `overlaps`, which no extension's follows, or behind it. A process
    that fails sends anything for the rest of a step, which none uses.
    """

    def __init__(self, processes: Processes, parameters: Sequence[torch.nn.Parameter], overlaps: bool = True):
        super().__init__(processes, parameters)
        self.overlaps, most = overlaps, BUCKET // 4
        # Of each bucket: (number of a parameter, its first value, end, place of the first in the bucket).
        self.buckets: list[list[tuple[int, int, int, int]]] = []
        filled = most
        for number, parameter in reversed([*enumerate(self.parameters)]):
            for start in range(0, parameter.numel(), most):
                stop = min(start + most, parameter.numel())
                if filled + stop - start > most:
                    self.buckets.append([])
                    filled = 0
                self.buckets[-1].append((number, start, stop, filled))
                filled += stop - start
        self._buffers = [torch.empty(most, device=processes.device) for _ in range(2)]
        self._flying: dict[int, Any] = {}  # calls by the number of their bucket

    @contextmanager
    def step(self) -> Iterator[None]:
        for work in self._flying.values():  # of a step that failed
            work.wait()
        self._flying, self._sent, self._failed, self._hooks = {}, 0, False, list[Any]()
        self._arrived, self._present, self._sums = set[int](), set[int](), dict[int, Tensor]()
        try:
            yield
            while self._sent < len(self.buckets):
                self._send()
            for bucket in sorted(self._flying):
                self._receive(bucket)
        except (Exception, Stopped):
            self._failed = True
            while self._sent < len(self.buckets):
                self._send()
            raise
        finally:
            for hook in self._hooks:
                hook.remove()

    def before_backward(self, last: bool) -> None:
        if last and self.overlaps:
            self._hooks = [parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._arrive(number))
                           for number, parameter in enumerate(self.parameters)]

    def _arrive(self, number: int) -> None:
        self._arrived.add(number)
        while self._sent < len(self.buckets) and all(each in self._arrived for each, *_ in self.buckets[self._sent]):
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        """Send the next bucket. A gradient that is sent is no longer its parameter's."""
        pieces, buffer = self.buckets[self._sent], self._buffers[self._sent % 2]
        if not self._failed:
            self._receive(self._sent - 2)
            for number, start, stop, at in pieces:
                if not start:  # take the gradient, zeros in the place of none
                    parameter = self.parameters[number]
                    if parameter.grad is not None:
                        self._present.add(number)
                    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    self._sums[number], parameter.grad = gradient.contiguous().view(-1), None
                buffer[at:at + stop - start] = self._sums[number][start:stop]
        self._sent += 1
        [*_, (_, start, stop, at)] = pieces
        self._flying[self._sent - 1] = distributed.all_reduce(buffer[:at + stop - start], async_op=True)

    def _receive(self, bucket: int) -> None:
        """Wait for a bucket, on a GPU its stream alone, and take its sums."""
        if work := self._flying.pop(bucket, None):
            work.wait()
            for number, start, stop, at in self.buckets[bucket]:
                self._sums[number][start:stop] = self._buffers[bucket % 2][at:at + stop - start]

    def finish(self, log: Callable[[str], None]) -> None:
        # A second backward through a weight leaves a gradient behind what was sent: those are summed by themselves.
        flags = [(number in self._present, p.grad is not None) for number, p in enumerate(self.parameters)]
        anywhere = torch.tensor(flags, dtype=torch.int32, device=self.processes.device)
        distributed.all_reduce(anywhere)
        present, late = anywhere.T.tolist()
        self.processes.add_gradients([parameter for parameter, more in zip(self.parameters, late) if more])
        for number, total in self._sums.items():
            parameter = self.parameters[number]
            if present[number]:
                total = total.view_as(parameter)
                parameter.grad = total if parameter.grad is None else parameter.grad + total
        self._sums = {}
