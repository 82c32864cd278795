"""A denoiser whose frozen weights are shared out over the processes, by FSDP2 (torch.distributed.fsdp.fully_shard).

Every process holds a part of each block and collects the rest while the block runs. The LoRA is no part of that: it is
small, in fp32 over weights of any precision, and whole on every process, so that its gradients, averages, snapshots
and files are those of a run that is not sharded.

A block can be collected only if all processes run it. Where they have different amounts to replay, one that has less
runs a row of its own beside the others, whose output nobody reads: `Turns`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import distributed

from flowgrpo.config import Config
from flowgrpo.errors import UserError
from flowgrpo.policies.compiled import blocks
from flowgrpo.signals import Stopped

# What a process is about to do, the most pressing last. Who looks at a reference, with the LoRA off, comes before who
# trains; and what was begun by a training forward is ended by its backward before anything else.
DONE, TRAIN, LOOK, BACKWARD, RUN, LEAVE = range(6)


def asked(shard: bool) -> bool:
    """Whether weights are shared out: on one process there is nobody to share with."""
    return shard and distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def require(config: Config, method) -> None:
    """UserError for options that do not go with `memory.shard`."""
    if not config.memory.shard:
        return
    preview = method.preview.precision if method.preview else "full"
    wrong = {"adapter.rank: 0, which trains what is shared out: set a rank": not config.adapter.rank,
             f"memory.weights: {config.memory.weights}: use full": config.memory.weights != "full",
             f"parts.preview.precision: {preview}: use full": preview != "full",
             "adapter.dora, which reads whole weights: use false": config.adapter.dora,
             "train.compile: use false": config.train.compile,
             f"method {config.method}, whose graph has many steps: use another":
             method.backprop is not None or method.chain is not None,
             "train.pack, whose replays are batched by what each process has: use false": config.train.pack,
             "cache, from which some processes would read what others compute: leave it out": config.cache is not None}
    for told in (told for told, found in wrong.items() if found):
        raise UserError(f"memory.shard is true, which does not go with {told}, or memory.shard: false")


def shard(module: torch.nn.Module, device: torch.device, whole: Iterable[torch.nn.Parameter]) -> None:
    """Share out the weights of a denoiser in place, block by block, all but those that stay `whole`; all of it comes to
    the device. Blocks are the entries of its module lists; what is in none is collected at once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kept = set(whole) & set(module.parameters())
    for parameter in kept:
        parameter.data = parameter.data.to(device)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for part in [*blocks(module), module]:
        # Nothing stays collected between calls, the root neither: reading a state dict, as the process that saves does
        # alone, gives it up, and the next call would find it here and not there.
        fully_shard(part, mesh=mesh, ignored_params=kept, reshard_after_forward=True)


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
