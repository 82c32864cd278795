"""Single kernels of a GPU that torch takes apart on the meta device: attention and RMS normalisation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

# torch's normalisation of CUDA gives its output and the rows' rstd; on meta it is seven operations.
_library = torch.library.Library("flowgrpo", "DEF")
_library.define("rms_norm(Tensor x, Tensor? weight) -> (Tensor, Tensor)")
_library.define("rms_norm_backward(Tensor grad, Tensor x, Tensor rstd, Tensor? weight, bool[2] needed)"
                " -> (Tensor, Tensor)")
_library.impl("rms_norm", lambda x, weight: (
    torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)), "Meta")
_library.impl("rms_norm_backward", lambda grad, x, rstd, weight, needed: (
    torch.empty_like(x) if needed[0] else x.new_empty(0),
    torch.empty_like(weight) if needed[1] else x.new_empty(0)), "Meta")


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        y, rstd = torch.ops.flowgrpo.rms_norm(x, weight)
        ctx.save_for_backward(x, rstd, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        found = torch.ops.flowgrpo.rms_norm_backward(grad, *ctx.saved_tensors, ctx.needs_input_grad)
        return tuple(value if needed else None for value, needed in zip(found, ctx.needs_input_grad, strict=True))


_composite = F.rms_norm


def rms_norm(x: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
             ) -> torch.Tensor:
    """Return the normalisation as `F.rms_norm`: on meta one kernel each way, where CUDA has one."""
    if not x.is_meta or len(normalized_shape) != 1 or weight is not None and weight.dtype != x.dtype:
        return _composite(x, normalized_shape, weight, eps)
    return _RMSNorm.apply(x, weight)  # type: ignore[no-untyped-call]


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
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
        out = attention(_four(query), _four(key), _four(value), mask, dropout_p, is_causal, scale, enable_gqa)
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
