"""Optimiser of a run, and the loss scaling of fp16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from flowgrpo.config.sections import Train


def make_optimizer(train: Train, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW over the parameters: in one kernel on CUDA, or with its two moments in 8 bits (2110.02861,
    bitsandbytes).

    Of the latter, tensors of fewer than 4,096 values keep their moments in 32 bits.
    """
    options: dict[str, Any] = {"lr": train.lr, "betas": train.betas, "weight_decay": train.weight_decay}
    if train.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, **options)
    return torch.optim.AdamW(parameters, fused=parameters[0].device.type == "cuda", **options)


def make_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """Return the loss scaler, active for fp16 only.

    The gradients of millions of decisions and latents underflow in fp16. So the loss is scaled up, and the gradients
    down again. If they overflow, the step is skipped and the scale halved.
    """
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    scaler.scale(torch.zeros((), device=device))  # creates the scale: a process may have nothing to train at first
    return scaler


def rate(update: int, total: int, train: Train) -> float:
    """Return the factor of the learning rate: linear warm-up, then the schedule down to 0 at the last update."""
    if update < train.warmup:
        return (update + 1) / train.warmup
    left = 1 - (update - train.warmup) / max(total - train.warmup, 1)
    return {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[train.schedule]
