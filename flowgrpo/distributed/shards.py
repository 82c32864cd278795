"""Shards of a tensor: rows of its first dimension that lie on one process, as FSDP2 deals them out (a DTensor)."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_shard(tensor: Tensor) -> bool:
    """Return True if this process holds only some rows of the tensor."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Return the rows [r,...] of this process, in the same memory; a whole tensor itself."""
    sharded: Any = tensor
    return sharded._local_tensor if is_shard(tensor) else tensor


def like(values: Tensor, parameter: Tensor) -> Tensor:
    """Return the rows `values` [r,...] of this process as a tensor that is sharded like the parameter."""
    from torch.distributed.tensor import DTensor

    model: Any = parameter
    return DTensor.from_local(values.to(local(parameter).device), model.device_mesh, model.placements,
                              shape=parameter.shape, stride=parameter.stride())


def rows(parameter: Tensor) -> slice:
    """Return the rows of this process among all those of a sharded parameter."""
    index, count, _ = place(parameter)
    size = -(-len(parameter) // count)
    return slice(min(index * size, len(parameter)), min((index + 1) * size, len(parameter)))


def place(parameter: Tensor) -> tuple[int, int, bool]:
    """Return (index of this process's shard, number of shards, True on the first process that holds this shard)."""
    mesh = parameter.device_mesh  # type: ignore[attr-defined]  # [shards], or [copies, shards]
    *copy, index = mesh.get_coordinate()
    return index, mesh.size(mesh.ndim - 1), not any(copy)
