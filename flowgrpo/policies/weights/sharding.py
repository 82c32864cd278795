"""Sharding of a denoiser's frozen weights over the processes, by FSDP2 (torch.distributed.fsdp.fully_shard).

Every process holds a part of each block and collects the rest while the block runs. The LoRA is not sharded. It is
small, in fp32 over weights of any precision, and whole on every process. So its gradients, averages, snapshots and
files are those of an unsharded run.

A block can be collected only if all processes run it. A process with less to replay runs an extra row with the others
and discards its output: `Lockstep`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import distributed

from flowgrpo.policies.weights.compiled import blocks


def asked(shard: bool) -> bool:
    """Return True if weights are sharded: `shard` is set and there are several processes."""
    return shard and distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def shard(module: torch.nn.Module, device: torch.device, whole: Iterable[torch.nn.Parameter]) -> None:
    """Shard the weights of a denoiser in place, block by block, except those in `whole`; all of it moves to the device.

    Blocks are the entries of its module lists; weights outside of them are collected at once.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kept = set(whole) & set(module.parameters())
    for parameter in kept:
        parameter.data = parameter.data.to(device)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for part in [*blocks(module), module]:
        # Nothing stays collected between calls, not even the root: reading a state dict, as the saving process does
        # alone, frees it, and the next call would find it on some processes only.
        fully_shard(part, mesh=mesh, ignored_params=kept, reshard_after_forward=True)
