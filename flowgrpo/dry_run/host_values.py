"""Values of small tensors on a pretended GPU: those that came from the host, and what is computed of them alone.

So grids, time steps, masks and lengths have their values, and code that branches on them takes its true way.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

LARGEST = 2**16  # values of a tensor that is followed
FACTORIES = frozenset(("arange", "zeros", "ones", "full", "scalar_tensor", "linspace"))


class HostValues:
    """Host copies of storages on the meta device."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a meta tensor, which shares its memory with that of its views; None if unknown."""
        copy = self._copies.get(tensor.untyped_storage()._cdata)
        if copy is None:
            return None
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return empty.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())

    def set(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Remember the value of a whole new meta tensor."""
        storage = tensor.untyped_storage()
        if tensor.numel() > LARGEST or storage.nbytes() > 16 * LARGEST:
            return
        if storage._cdata not in self._copies:
            self._copies[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="cpu")
            weakref.finalize(storage, self._copies.pop, storage._cdata, None)
        known = self.of(tensor)
        assert known is not None
        known.copy_(value)

    def follow(self, function: Any, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], args: Any,
               kwargs: Any) -> None:
        """Compute the outputs' values, if all inputs have one; else forget those of outputs that were written."""
        known = all(tensor.untyped_storage()._cdata in self._copies for tensor in inputs)
        if known and (inputs or name in FACTORIES) and len(outputs) == 1 and outputs[0].numel() <= LARGEST:
            host = {"device": "cpu"} if "device" in kwargs else {}
            args, kwargs = tree_map_only(torch.Tensor, self._on_host, (args, kwargs))
            result = function(*args, **kwargs | host)
            if torch.is_tensor(result):
                self.set(outputs[0], result)
        else:
            for tensor in outputs:
                self.forget(tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        """Forget the value of a tensor and of its views."""
        self._copies.pop(tensor.untyped_storage()._cdata, None)

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        value = self.of(tensor) if tensor.is_meta else tensor
        assert value is not None
        return value
