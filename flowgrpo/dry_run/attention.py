"""Attention of a pretended GPU: the operations that torch's fused kernels are."""

from __future__ import annotations

from typing import Any

import torch


def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
          dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
          ) -> torch.Tensor:
    """Return attention as `F.scaled_dot_product_attention`: on meta flash attention without a mask, else the efficient
    kernel, which a GPU would take."""
    if not query.is_meta:
        return torch._C._nn.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal,
                                                         scale=scale, enable_gqa=enable_gqa)
    if query.ndim != 4:
        batch = query.shape[:-3]
        mask = None if attn_mask is None else _four(attn_mask)
        out = fused(_four(query), _four(key), _four(value), mask, dropout_p, is_causal, scale, enable_gqa)
        return out.view(*batch, *out.shape[1:]) if batch else out[0]
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    operations: Any = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] <= 256:
        return operations._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False,
                                                              scale=scale)[0]
    if attn_mask is not None:
        added = torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
        attn_mask = added.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    return operations._scaled_dot_product_efficient_attention(query, key, value, attn_mask, torch.is_grad_enabled(),
                                                              dropout_p, is_causal, scale=scale)[0]


def _four(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor [..., H, N, D] with one leading dimension."""
    return tensor[None] if tensor.ndim == 3 else tensor.flatten(0, -4)
