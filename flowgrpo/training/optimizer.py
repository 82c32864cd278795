"""The optimiser of a run, and what keeps its gradients from vanishing in fp16."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowgrpo.config.sections import Train


def make_optimizer(train: Train, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW over the parameters: in one kernel on CUDA, or with its two moments in 8 bits (2110.02861, bitsandbytes),
    in which tensors of fewer than 4,096 values keep them in 32."""
    options = {"lr": train.lr, "betas": train.betas, "weight_decay": train.weight_decay}
    if train.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, **options)
    return torch.optim.AdamW(parameters, fused=parameters[0].device.type == "cuda", **options)


def make_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """Of fp16 alone: the loss is scaled up, since the gradients of millions of decisions and latents lie below what
    fp16 can hold, and the gradients down again; where they overflow the step is skipped and the scale halved."""
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    scaler.scale(torch.zeros((), device=device))  # it has no scale before: a process may have nothing to train at first
    return scaler
