"""A denoiser whose frozen weights are shared out over the processes, by FSDP2 (torch.distributed.fsdp.fully_shard).

Every process holds a part of each block and collects the rest while the block runs. The LoRA is no part of that: it is
small, in fp32 over weights of any precision, and whole on every process, so that its gradients, averages, snapshots
and files are those of a run that is not sharded.

A block can be collected only if all processes run it. Where they have different amounts to replay, one that has less
runs a row of its own beside the others, whose output nobody reads: `Turns`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import distributed

from flowgrpo.policies.weights.compiled import blocks


def asked(shard: bool) -> bool:
    """Whether weights are shared out: on one process there is nobody to share with."""
    return shard and distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


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
