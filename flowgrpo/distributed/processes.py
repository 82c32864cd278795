"""Processes of a run, and their collectives. On one process everything here is the identity.

Every process holds the same weights and takes an equal share of the epoch's samples: whole groups where the processes
divide the prompts, else equal slices of groups. Values that a method compares are gathered, so every process computes
them on the whole. Gradients are summed once per optimizer step. Every process makes the same calls in the same order: a
branch around one is taken by all or by none.

With context parallelism a team of processes runs the same rows and counts as one process here.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, distributed

from flowgrpo.device import ran_out
from flowgrpo.distributed import launchers, signals
from flowgrpo.distributed.shards import DONE, Lockstep, is_shard
from flowgrpo.distributed.signals import Stopped
from flowgrpo.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

ELSEWHERE = "another process failed or was asked to stop"
DIMENSIONS = 8  # largest number of dimensions of a gathered tensor
# How long a process waits for others with slower rewards; `watch` notices those that are lost.
PATIENCE = timedelta(hours=2)

# Since when (time.monotonic), and of what, this process has failed while it waits for the others.
failures: list[tuple[float, Exception]] = []

T = TypeVar("T")
Rows = TypeVar("Rows", bound=Sequence[Any] | Tensor)  # a slice of it is one too


class OutOfMemoryElsewhere(torch.OutOfMemoryError):
    """Another process ran out of memory, and this one did not."""


class Processes:
    """rank: this process's number, or its team's.
    count: the number of processes, or of teams.
    members: processes of a team, which run the same rows; member: this one's number in it.
    device: of collectives.

    Without an accelerator: this process alone, under any launcher.
    """

    def __init__(self, accelerator: Accelerator | None = None, members: int = 1):
        self.rank, self.count, self.device = 0, 1, torch.device("cpu")
        self.members, self.member = members, 0
        self.group: Any = getattr(accelerator, "group", None)  # all processes of a side (`sides`); None: all there are
        self.peers: Any = self.group  # the processes of this one's number in every team; None: all
        self.team: Any = None
        self.samples: bool = getattr(accelerator, "samples", False)  # those of a side that trains nothing
        if accelerator is not None:
            self.count, self.device = accelerator.num_processes // members, accelerator.device
            self.rank, self.member = divmod(accelerator.process_index, members)
        if members > 1:
            world = torch.arange(self.count * members).view(self.count, members)
            peers = [distributed.new_group(ranks, PATIENCE) for ranks in world.T.tolist()]
            teams = [distributed.new_group(ranks, PATIENCE) for ranks in world.tolist()]
            self.peers, self.team = peers[self.member], teams[self.rank]
        self.lockstep: Lockstep | None = None  # of a policy whose weights are shared out
        self.parted = False  # True once all have left `collective` for one that failed

    @property
    def first(self) -> bool:
        return self.rank == 0 and self.member == 0 and not self.samples

    @property
    def reports(self) -> bool:
        """True on the process of its team that scores samples."""
        return self.member == 0

    def own(self, whole: Rows) -> Rows:
        """This process's share of a list or of a tensor's rows that all processes have; the inverse of `gather`."""
        low, high = (len(whole) * rank // self.count for rank in (self.rank, self.rank + 1))
        return cast("Rows", whole[low:high])

    def gather(self, values: Tensor) -> Tensor:
        """Rows [n,...] of all processes, in the order of their ranks; n may differ per process, and may be 0."""
        if self.count > 1:
            # The shapes of all processes' values, padded with zeros: int64 [processes,DIMENSIONS].
            shape = torch.tensor([*values.shape] + [0] * (DIMENSIONS - values.ndim), device=self.device)
            every = [torch.empty_like(shape) for _ in range(self.count)]
            distributed.all_gather(every, shape, self.peers)
            shapes = torch.stack(every).cpu()
            if shapes[:, 0].any():
                largest = shapes[shapes[:, 0].argmax()].tolist()
                padded = torch.zeros([size for size in largest if size], dtype=values.dtype, device=self.device)
                padded[:len(values)] = values.reshape(len(values), *padded.shape[1:])
                gathered = [torch.empty_like(padded) for _ in range(self.count)]
                distributed.all_gather(gathered, padded, self.peers)
                values = torch.cat([rows[:n] for rows, n in zip(gathered, shapes[:, 0].tolist())]).to(values.device)
        return self.of_team(values)

    def gather_named(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rows [n,...] of all processes by name, gathered at once: every process has the same names, in any order,
        and each value n rows of one dtype and at most one further dimension."""
        order = sorted(values)
        columns = [value if value.ndim > 1 else value[:, None] for value in map(values.__getitem__, order)]
        parts = self.gather(torch.cat(columns, 1)).split([column.shape[1] for column in columns], 1)
        return {name: part if values[name].ndim > 1 else part[:, 0] for name, part in zip(order, parts)}

    def of_team(self, values: Tensor) -> Tensor:
        """The values of the team's first member."""
        if self.members == 1 or not values.numel():
            return values
        shared = values.to(self.device).contiguous()
        distributed.broadcast(shared, self.rank * self.members, self.team)
        return shared.to(values.device)

    def gather_samples(self, samples: list[Tensor] | list[str]) -> Tensor | list[str]:
        """The samples of all processes, in the order of their ranks.
        Images or clips of one shape are one tensor, an empty one without any; texts are a list."""
        if self.count > 1:
            gathered: list[Any] = [None] * self.count
            distributed.all_gather_object(gathered, [sample.cpu() if torch.is_tensor(sample) else sample
                                                     for sample in samples], self.peers)
            samples = [sample for local in gathered for sample in local]
        if samples and isinstance(samples[0], str):
            return cast("list[str]", samples)
        return torch.stack(cast("list[Tensor]", samples)) if samples else torch.empty(0)

    def total(self, numbers: Sequence[int]) -> list[int]:
        """Sums over all processes, of a team its first member's, one per number."""
        if self.count * self.members == 1:
            return list(numbers)
        summed = torch.tensor([int(number) for number in numbers], device=self.device)
        if self.count > 1:
            distributed.all_reduce(summed, group=self.peers)
        return self.of_team(summed).tolist()

    def any(self, flag: bool) -> bool:
        """True if the flag is set on any process, all members of teams included."""
        return self._set(flag, self.group) if self.count * self.members > 1 else bool(flag)

    def any_of_team(self, flag: bool) -> bool:
        return self._set(flag, self.team) if self.members > 1 else flag

    def _set(self, flag: bool, group: Any) -> bool:
        flags = torch.tensor([int(flag)], device=self.device)
        distributed.all_reduce(flags, group=group)
        return flags.item() > 0

    def wait(self) -> None:
        """Barrier: return when all processes are here."""
        self.any(False)

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Context manager for work in which no process waits for another: if one fails or is asked to stop, all leave
        here.

        Raises the error of the process that failed, and Stopped on the others, when their own work is done; with
        sharded weights, before their next call of the denoiser. If those that fail are all out of memory, the others
        raise OutOfMemoryElsewhere, so that all can go on alike. A member of a team that fails within its work leaves
        alone: the others may wait in the denoiser, until `watch` ends them.
        """
        try:
            yield
            if self.lockstep is not None:
                self.lockstep.join(DONE)  # go with the others until all are done
        except (Exception, Stopped) as error:
            if self.members > 1 and not isinstance(error, (UserError, Stopped)):
                raise
            full = ran_out(error)
            with _failing(error) if not full and isinstance(error, Exception) else nullcontext():
                if self.lockstep is not None:
                    self.lockstep.abort()
                others = self.lockstep is None and self.total([1, not full])[1]
            self.parted = True
            if full and others:
                raise Stopped(ELSEWHERE) from error
            raise
        if self.lockstep is None:
            failed, otherwise = self.total([0, 0])
            self.parted = self.parted or failed > 0
            if failed:
                raise Stopped(ELSEWHERE) if otherwise else OutOfMemoryElsewhere("out of memory on another process")

    def alike(self, calls: Callable[[], object]) -> AbstractContextManager[Callable[[int], object]]:
        """A context, inside `collective`, in which sharded processes with the same calls make them without
        agreeing on each: `Lockstep.in_step`.
        calls: returns what this process's calls go by; equal values have the same `repr` everywhere."""
        return nullcontext(lambda number: None) if self.lockstep is None else \
            self.lockstep.in_step(zlib.crc32(repr(calls()).encode()))

    def in_step(self, parts: Sequence[T], calls: Callable[[Sequence[T], Processes], object],
                before: Callable[[], object] = lambda: None) -> Iterator[T]:
        """Yield parts, `alike` by what `calls` returns of them and this object.
        before: called before each part, where a process may still leave with the others."""
        with self.alike(lambda: calls(parts, self)) as begin:
            for number, part in enumerate(parts):
                before()
                begin(number)
                yield part

    def add_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum the gradients of all processes, in one flat tensor. Members of a team each have a part of their sum.
        A parameter without a gradient here counts as zeros; one that got none anywhere keeps none. FSDP2 has summed
        those of sharded parameters in the backward pass."""
        if self.count * self.members == 1:
            return
        parameters = [parameter for parameter in parameters if not is_shard(parameter)]
        if not parameters:
            return
        with self.collective():
            present = torch.tensor([float(p.grad is not None) for p in parameters], device=self.device)
            flat = torch.cat([present, *(torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                                         for p in parameters)])
        distributed.all_reduce(flat, group=self.group)
        anywhere, flat = flat[:len(parameters)].tolist(), flat[len(parameters):]
        for parameter, has_gradient, piece in zip(parameters, anywhere, flat.split([p.numel() for p in parameters])):
            parameter.grad = piece.view_as(parameter) if has_gradient else None

    @torch.no_grad()
    def require_equal(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Copy the first process's values to every process, except those of sharded parameters."""
        for parameter in parameters if self.count * self.members > 1 else ():
            if not is_shard(parameter):
                distributed.broadcast(parameter.data, group=self.group, group_src=0)


@contextmanager
def _failing(error: Exception) -> Iterator[None]:
    """Context manager in which this process has failed, and waits for the others to leave too: `watch` limits that, and
    asks them to stop."""
    failures.append((time.monotonic(), error))
    signals.ask()
    try:
        yield
    finally:
        failures.pop()


def make_accelerator(device: str) -> Accelerator:
    """The accelerator; launch, device and collectives are accelerate's.
    Raises UserError if it was configured to shard the model, and the run has not taken that over (`launchers`)."""
    from accelerate import Accelerator, InitProcessGroupKwargs

    for kind in launchers.accelerate_kinds(os.environ, (launchers.THEIRS,)):
        raise UserError(f"launched with {kind}, which only flowgrpo train and align read: {launchers.PLAIN}")
    patience = InitProcessGroupKwargs(timeout=PATIENCE)
    return Accelerator(cpu=device == "cpu", kwargs_handlers=[patience])
