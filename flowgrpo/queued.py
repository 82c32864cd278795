"""Copies that the host does not wait for."""

from __future__ import annotations

import torch


def queued(tensor: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    """The tensor on the device (None: where it is). From the CPU to a GPU it goes by pinned memory: the copy is queued,
    and the host does not wait for what was queued before; torch keeps the pinned memory until the copy is done."""
    if device is None or tensor.device.type != "cpu" or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
