"""Gradient checkpointing of language models: a layer's activations are computed again in the backward pass.

transformers does this in training mode alone, which would turn dropout on, so that a replay would not be the rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from flowgrpo.errors import UserError


def recompute(model: torch.nn.Module) -> None:
    """Hold of every layer only what goes into it, where gradients are enabled. The model is called without a cache
    then. UserError for one whose layers transformers does not know."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    inside: set[torch.nn.Module] = set()
    for layer in model.modules():  # those around others come first
        if isinstance(layer, GradientCheckpointingLayer) and layer not in inside:
            inside |= {*layer.modules()}
            layer.forward = partial(_again, layer.forward)
    if not inside:
        raise UserError(f"train.checkpointing is true, but {type(model).__name__} has no layers that transformers can "
                        "compute again: set it to false, or lower train.micro_batch")


def _again(forward: Callable, *args: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    return checkpoint(forward, *args, use_reentrant=False, **options)
