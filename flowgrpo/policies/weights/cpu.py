"""Arithmetic that a CPU does faster than torch's own; results differ by rounding alone.

Attention in three plain operations in place of the fused kernel, whose backward is several times slower (measured by
`scripts/bench_overhead.py`), and linear layers that read contiguous rows (`scripts/cpu_layouts.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FUSED = F.scaled_dot_product_attention
LARGEST = 2**28  # scores of one call; they have to fit in memory; above, the fused kernel's smaller one counts for more


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
          dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
          ) -> torch.Tensor:
    """Return softmax(q k^T * scale + mask) v, [..., N, D], as `F.scaled_dot_product_attention`.

    What it lacks goes there.
    """
    size = query.shape[:-1].numel() * key.shape[-2]
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    if dropout_p or enable_gqa or is_causal or boolean or size > LARGEST:
        return FUSED(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    scores = (query * (scale or query.shape[-1] ** -0.5)) @ key.transpose(-1, -2)
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


def contiguous_inputs(modules: Iterable[torch.nn.Module], device: torch.device) -> None:
    """Make linear layers on a CPU read contiguous rows, by a hook that copies their input where it is not contiguous.

    One half of a joint attention's output is not. For such an input torch copies the weights once per row of the batch
    and calls aten::bmm.
    """
    for module in modules if device.type == "cpu" else ():
        for layer in module.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(_contiguous)


def _contiguous(_layer: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.contiguous() if isinstance(value, Tensor) else value for value in args)
