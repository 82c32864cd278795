"""Weights that wait in the CPU's memory and come to the device for their work."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class HostWeights:
    """Weights of modules in the CPU's memory, pinned for a GPU; between `load` and `offload` copies stand for them.

    deep: with all that is inside the modules. Weights that are on the device when they come stay there.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], device: torch.device, deep: bool = True):
        self.modules, self.device, self.deep, self.here = list(modules), device, deep, False
        self._waiting: list[tuple[dict[str, Any], str, torch.Tensor]] = []  # of each copy on the device, its original

    def load(self) -> None:
        """Copy the weights to the device; the host does not wait for the copies."""
        if self.here:
            return
        self.here = True
        copies: dict[int, torch.Tensor] = {}  # tied weights have one
        parts = (part for module in self.modules for part in (module.modules() if self.deep else [module]))
        for _, place, name, tensor in _tensors(parts):
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
            if not (plain or is_traceable_wrapper_subclass(tensor)) or tensor.device == self.device:
                continue
            if id(tensor) not in copies:
                if self.device.type == "cuda":
                    _pin(tensor)
                copies[id(tensor)] = _copy_to(tensor, self.device)
            self._waiting.append((place, name, tensor))
            place[name] = copies[id(tensor)]

    def offload(self) -> None:
        """Drop the copies on the device; nothing is copied back."""
        for place, name, tensor in self._waiting:
            place[name] = tensor
        self._waiting, self.here = [], False


def _tensors(parts: Iterable[torch.nn.Module]
             ) -> Iterator[tuple[torch.nn.Module, dict[str, Any], str, torch.Tensor]]:
    """Yield the parameters and buffers of each part, with the dictionary that holds each and its name there."""
    for part in parts:
        places: tuple[dict[str, Any], ...] = part._parameters, part._buffers
        for place in places:
            for name, tensor in place.items():
                if tensor is not None:
                    yield part, place, name, tensor


def _pin(tensor: torch.Tensor) -> None:
    """Pin a tensor's memory in place; of a quantised one that of its parts."""
    if not is_traceable_wrapper_subclass(tensor):
        tensor.data = tensor.data if tensor.is_pinned() else tensor.data.pin_memory()
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if not part.is_pinned():
            setattr(tensor, name, part.pin_memory())


def move_rest(module: torch.nn.Module, device: torch.device, waiting: Iterable[torch.nn.Module]) -> None:
    """Move a module to the device, without the modules inside it that wait; of these the trained weights alone."""
    away = {part for one in waiting for part in one.modules()}
    copies: dict[int, torch.Tensor] = {}  # tied weights have one
    for part, place, name, tensor in _tensors(module.modules()):
        if (part not in away or tensor.requires_grad) and tensor.device != device:
            place[name] = copies.setdefault(id(tensor), _copy_to(tensor, device))


def _copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    copy = tensor.detach().to(device, non_blocking=True)
    return torch.nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copy


class Offloaded(HostWeights):
    """Frozen modules that leave the device for `away` while they have nothing to do; with `away` None they stay."""

    def __init__(self, modules: Iterable[torch.nn.Module], device: torch.device, away: str | None, here: bool):
        super().__init__(modules, device)
        self.away, self.here = away, here

    def load(self) -> None:
        if not self.here:
            super().load()
            for module in self.modules:
                module.to(self.device)  # quantised weights, which know how they are moved

    def offload(self) -> None:
        if self.here and self.away is not None:
            super().offload()
            for module in self.modules:
                module.to(self.away)  # what was quantised, or added since
