"""Weights that wait in the CPU's memory and are copied to the device while they are needed.

They are frozen: to leave drops the copies on the device, and nothing is copied back. A graph that was recorded with the
copies keeps them. Trained weights beside them stay on the device.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flowgrpo.config.sections import Memory
from flowgrpo.errors import UserError
from flowgrpo.methods.setup import Setup, require_compatible
from flowgrpo.policies.weights.checkpointing import WRONG, supported
from flowgrpo.policies.weights.compiled import blocks

BLOCK, LEAF = "block_level", "leaf_level"  # the names that diffusers has for them


def require_waiting(setup: Setup) -> None:
    """Raise UserError for options that conflict with `memory.denoiser` or `memory.offload`."""
    config, method = setup.config, setup.method
    memory, offloads = config.memory, config.memory.offload != "none"
    if memory.denoiser == "keep" and not offloads:
        return
    setting = f"memory.offload is {memory.offload}" if offloads else "memory.denoiser is cpu"
    preview = method.denoising.preview.precision if method.denoising.preview else "full"
    wrong = {"memory.denoiser: cpu, since blocks wait there anyway: use keep": offloads and memory.denoiser == "cpu",
             "memory.encoders: keep, beside which it would not leave: use cpu":
             not offloads and memory.encoders == "keep",
             f"train.checkpointing: {str(config.train.checkpointing).lower()}, without which a graph keeps the weights "
             "of all blocks: use true": offloads and config.train.checkpointing is not True,
             "adapter.rank: 0, whose weights are all trained: set a rank": not config.adapter.rank,
             "adapter.dora, which reads whole weights: use false": offloads and config.adapter.dora,
             "text encoders that are trained: set parts.adapted.encoders: false": method.denoising.adapted.encoders,
             "memory.weights: nf4, whose packed weights do not wait: use int8 or fp8": memory.weights == "nf4",
             f"load.denoiser: {config.load.denoiser}, whose packed weights do not wait: use a .safetensors file":
             config.load.gguf,
             f"parts.preview.precision: {preview}: use full": preview != "full",
             "memory.shard: use false": bool(memory.shard),
             "memory.context_parallel: use 1": memory.context_parallel > 1,
             "train.compile: use false": config.train.compile}
    require_compatible(setting, wrong)


class Encoders(Protocol):
    """Text encoders that come and leave (`memory_options.Encoders`); beside: weights that leave when they come."""

    beside: HostWeights | None

    def offload(self) -> None: ...


class HostWeights:
    """Weights of modules in the CPU's memory, pinned for a GPU; between `come` and `leave` copies stand for them.

    deep: with all that is inside the modules. Weights that are on the device when they come stay there.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], device: torch.device, deep: bool = True):
        self.modules, self.device, self.deep, self.here = list(modules), device, deep, False
        self._waiting: list[tuple[dict[str, Any], str, torch.Tensor]] = []  # of each copy on the device, its original

    def come(self) -> None:
        """Copy the weights to the device; the host does not wait for the copies."""
        if self.here:
            return
        self.here = True
        copies: dict[int, torch.Tensor] = {}  # tied weights have one
        for place, name, tensor in [*self._tensors()]:
            if id(tensor) not in copies:
                copies[id(tensor)] = self._copy(tensor)
            self._waiting.append((place, name, tensor))
            place[name] = copies[id(tensor)]

    def offload(self) -> None:
        """Drop the copies on the device; nothing is copied back."""
        for place, name, tensor in self._waiting:
            place[name] = tensor
        self._waiting, self.here = [], False

    def _tensors(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        """Yield the parameters and buffers that wait, with the dictionary that holds each and its name there."""
        for part in (part for module in self.modules for part in (module.modules() if self.deep else [module])):
            places: tuple[dict[str, Any], ...] = part._parameters, part._buffers
            for place in places:
                for name, tensor in place.items():
                    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
                    if (plain or is_traceable_wrapper_subclass(tensor)) and tensor.device != self.device:
                        yield place, name, tensor

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cuda":
            _pin(tensor)
        return _copied(tensor, self.device)


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
    for part in module.modules():
        places: tuple[dict[str, Any], ...] = part._parameters, part._buffers
        for place in places:
            for name, tensor in place.items():
                if tensor is not None and (part not in away or tensor.requires_grad) and tensor.device != device:
                    place[name] = copies.setdefault(id(tensor), _copied(tensor, device))


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    copy = tensor.detach().to(device, non_blocking=True)
    return torch.nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copy


def offload(module: torch.nn.Module, device: torch.device, level: str) -> list[HostWeights]:
    """Let the frozen weights of a denoiser's blocks wait in the CPU's memory, and come for a forward of their own.

    level: `block_level`, all weights of a block together, or `leaf_level`, those of every layer by themselves. What is
    outside of the blocks moves to the device. A recomputation in the backward brings weights again.
    Raises UserError for a denoiser without blocks, or whose blocks diffusers cannot checkpoint.
    """
    parts = blocks(module)
    setting = f"memory.offload is {level}, but {type(module).__name__} has no"
    if not parts:
        raise UserError(f"{setting} list of blocks: use none")
    if not supported(module) or type(module).__name__ in WRONG:
        raise UserError(f"{setting} gradient checkpointing by diffusers: use none")
    move_rest(module, device, parts)
    if level == LEAF:
        parts = [part for block in parts for part in block.modules() if part._parameters or part._buffers]
    groups = [HostWeights([part], device, deep=level == BLOCK) for part in parts]
    for part, group in zip(parts, groups):
        _bring(part, group)
    return groups


def later(memory: Memory) -> bool:
    """Return True if denoisers do not come to the device with the other parts of a pipeline."""
    return memory.denoiser != "keep" or memory.offload != "none"


def place(denoisers: Iterable[torch.nn.Module], encoders: Encoders, device: torch.device, memory: Memory,
          weights: Any = None) -> None:
    """Let the frozen weights of denoisers wait as `memory.denoiser` and `memory.offload` say; no-op for the defaults.

    weights: a LoRA on them that is trained, and stays on the device; without one weights wait block by block.
    """
    if not later(memory):
        return
    if memory.offload != "none":
        for module in denoisers:
            offload(module, device, memory.offload if weights is not None else BLOCK)
    else:
        turns(list(denoisers), encoders, device)
    if weights is not None:
        weights.hold()


def turns(denoisers: Sequence[torch.nn.Module], encoders: Encoders, device: torch.device) -> None:
    """Let denoisers and text encoders be on the device by turns: denoisers come with a forward of one."""
    weights = encoders.beside = HostWeights(denoisers, device)

    def come(*_: Any) -> None:
        encoders.offload()
        weights.come()

    for module in denoisers:
        move_rest(module, device, [module])
        module.register_forward_pre_hook(come)


def _bring(part: torch.nn.Module, group: HostWeights) -> None:
    """Make the group come before a module's forward, and leave behind it."""
    forward = part.forward

    @functools.wraps(forward)
    def answer(*args: Any, **kwargs: Any) -> Any:
        group.come()
        try:
            return forward(*args, **kwargs)
        finally:
            group.offload()

    vars(answer)["__signature__"] = inspect.signature(forward)  # some pipelines test for an argument
    part.forward = answer
