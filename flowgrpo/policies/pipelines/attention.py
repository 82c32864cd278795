"""Attention kernels of denoisers, by name: those of diffusers that have a backward."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.log import quiet


@dataclass(frozen=True)
class Kernel:
    """Attention backend of diffusers, and its requirements.

    package: that has to be installed, "" for none. capability: lowest compute capability of the GPU; (0, 0): any
    device. half: only bf16 and fp16.
    """

    backend: str
    package: str = ""
    capability: tuple[int, int] = (0, 0)
    half: bool = False


# Sage has no backward. diffusers' own operator around FlashAttention 3 has none either; the one from the hub has.
KERNELS = {
    "native": Kernel("native"),
    "cudnn": Kernel("_native_cudnn", "", (8, 0), True),
    "flash": Kernel("flash", "flash_attn", (8, 0), True),
    "flash3": Kernel("_flash_3_hub", "kernels", (9, 0), True),
    "xformers": Kernel("xformers", "xformers", (7, 0)),
}


def require_attention(name: str, device: torch.device, precision: str) -> None:
    """Raise UserError if a kernel lacks its package, its GPU or its precision. name: `auto` or one of KERNELS."""
    if name == "auto":
        return
    kernel = KERNELS[name]
    setting, fix = f"memory.attention is {name!r}", "use auto"
    if kernel.package and importlib.util.find_spec(kernel.package) is None:
        raise UserError(f"{setting}, which needs the package {kernel.package}: install it, or {fix}")
    here = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if here < kernel.capability:
        lowest, of = ".".join(map(str, kernel.capability)), ".".join(map(str, here)) if any(here) else "none"
        raise UserError(f"{setting}, which needs a GPU of compute capability {lowest}, and {device} has {of}: {fix}")
    if kernel.half and precision == "fp32":
        raise UserError(f"{setting}, which computes in bf16 and fp16, and precision is 'fp32': {fix}, or precision: "
                        "bf16")


def use_attention(name: str, denoisers: Iterable[Any]) -> None:
    """Make the attention of denoisers, diffusers' models, compute with a kernel. `auto` changes nothing.

    Raises UserError if a model calls torch's attention itself, and if diffusers refuses the kernel.
    """
    if name == "auto":
        return
    from diffusers.models.attention_dispatch import attention_backend

    backend = KERNELS[name].backend
    for module in denoisers:
        processors = [part.processor for part in module.modules() if hasattr(part, "processor")]
        if not any(hasattr(processor, "_attention_backend") for processor in processors):
            if name == "native":  # which is what it calls
                continue
            raise UserError(f"memory.attention is {name!r}, but the attention of {type(module).__name__} calls torch's "
                            "scaled_dot_product_attention itself: use auto")
        try:
            with quiet(), attention_backend(backend):  # the latter restores the backend of all other models
                module.set_attention_backend(backend)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise UserError(f"memory.attention is {name!r}, which diffusers refuses "
                            f"({' '.join(str(error).split())[:160]}): use auto") from None
