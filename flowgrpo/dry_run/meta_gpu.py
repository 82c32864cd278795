"""Pretended GPU: tensors of torch's device "meta" have the shapes of a GPU's tensors, and no values.

`MetaGPU` sees every operation on them. By phase it counts the peak of the bytes alive, FLOPs, kernels, the seconds of a
roofline, and what makes the host wait: values that it reads, and copies that block. What it reads is 0, 1 or True.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from flowgrpo import device
from flowgrpo.dry_run.gpus import GPU

META = torch.device("meta")
BLOCK = 512  # bytes to which CUDA's allocator rounds
SMALL = 2**26  # bytes of a copy to the host that is filled with zeros; a larger one is left as it comes
# Operations that start no kernel.
FREE = frozenset("""view _unsafe_view t transpose permute expand slice select unsqueeze squeeze split unbind
    split_with_sizes alias detach as_strided _reshape_alias unsafe_split chunk view_as_real view_as_complex narrow
    diagonal lift_fresh empty empty_like empty_strided new_empty new_empty_strided is_pinned squeeze_ unsqueeze_ set_
    resize_ _conj detach_ _to_copy_view""".split())


@dataclass
class Phase:
    """Counts of a phase: bytes at the peak, FLOPs, kernels, seconds of the roofline, reasons for the host to wait."""

    peak: int = 0
    flops: float = 0.0
    kernels: int = 0
    seconds: float = 0.0
    waits: Counter[str] = field(default_factory=Counter)


class MetaGPU(TorchDispatchMode):
    """Counts of the operations on meta tensors, while `running`."""

    def __init__(self, gpu: GPU):
        super().__init__()
        self.gpu, self.alive, self.bytes = gpu, dict[int, int](), 0
        self.phases: dict[str, Phase] = defaultdict(Phase)
        self.phase = self.phases["setup"]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: count; attention is the fused kernel of a GPU."""
        F.scaled_dot_product_attention, fused = _attention, F.scaled_dot_product_attention
        try:
            with torch.autograd.set_multithreading_enabled(False), self:
                yield
        finally:
            F.scaled_dot_product_attention = fused

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Context manager: count for the phase `name`."""
        before, self.phase = self.phase, self.phases[name]
        self.phase.peak = max(self.phase.peak, self.bytes)
        try:
            yield
        finally:
            self.phase = before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [value for value in tree_leaves((args, kwargs)) if _on_meta(value)]
        made = kwargs.get("device")
        if not inputs and (made is None or torch.device(made) != META):
            return function(*args, **kwargs)
        name = function._schema.name.partition("::")[2]
        if name in _READS:
            self.phase.waits[f"{name}: {_caller()}"] += 1
            return _READS[name](args[0], *args[1:])
        if name in ("_to_copy", "copy_") and (copied := self._copied(name, args, kwargs)) is not None:
            return copied
        result = function(*args, **kwargs)
        outputs = [value for value in tree_leaves(result) if _on_meta(value)]
        for tensor in outputs:
            self._hold(tensor)
        if name not in FREE:
            self._launch(function, name, inputs, outputs, result, args, kwargs)
        return result

    def _hold(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor for as long as it lives."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return
        self.alive[key] = size = -(-storage.nbytes() // BLOCK) * BLOCK
        self.bytes += size
        weakref.finalize(storage, self._release, key)
        self.phase.peak = max(self.phase.peak, self.bytes)

    def _release(self, key: int) -> None:
        self.bytes -= self.alive.pop(key, 0)

    def _launch(self, function: Any, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], result: Any,
                args: Any, kwargs: Any) -> None:
        tensors = {id(tensor): tensor for tensor in (*inputs, *outputs)}.values()
        traffic = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        count = flop_registry.get(function._overloadpacket)
        flops = float(count(*args, **kwargs, out_val=result)) if count else 0.0
        half = not any(tensor.dtype in (torch.float32, torch.float64) for tensor in inputs)
        self.phase.flops += flops
        self.phase.kernels += 1
        self.phase.seconds += self.gpu.seconds(flops, traffic, half, "attention" in name)

    def _copied(self, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Return the host's copy of a meta tensor; None for other copies. Copies that block are counted."""
        source = args[1] if name == "copy_" else args[0]
        place = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
        if source.device == META and place.type == "cpu":
            self.phase.waits[f"to the host: {_caller()}"] += 1
            if name == "copy_":
                return args[0]
            dtype = kwargs.get("dtype") or source.dtype
            make = torch.zeros if source.numel() * source.element_size() <= SMALL else torch.empty
            return make(source.shape, dtype=dtype, device="cpu")
        if source.device.type == "cpu" and place == META and source.numel() > 1 and not _queued():
            self.phase.waits[f"from the host: {_caller()}"] += 1
        return None


def _on_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device == META


def _scalar(tensor: torch.Tensor, *_: Any) -> bool | int | float:
    return True if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 1


# What the host reads of tensors.
_READS: dict[str, Any] = {
    "_local_scalar_dense": _scalar,
    "is_nonzero": lambda tensor: True,
    "equal": lambda tensor, other: tensor.shape == other.shape,
    "nonzero": lambda tensor: torch.empty(tensor.numel(), tensor.ndim, dtype=torch.int64, device=META)}


def _caller() -> str:
    """Return the nearest line outside of torch that the operation came from."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and "/torch/" not in file:
            return f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return "unknown"


def _queued() -> bool:
    """Return True within `device.queued`, whose copies to a GPU do not block."""
    frame = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code is device.queued.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return False


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
               dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
               ) -> torch.Tensor:
    """Return attention by the kernel that a GPU would take: flash attention without a mask, else the efficient one."""
    if query.device != META:
        return torch._C._nn.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal,
                                                         scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    operations: Any = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32:
        return operations._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False,
                                                              scale=scale)[0]
    if attn_mask is not None:
        mask = torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
        attn_mask = mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    return operations._scaled_dot_product_efficient_attention(query, key, value, attn_mask, torch.is_grad_enabled(),
                                                              dropout_p, is_causal, scale=scale)[0]
