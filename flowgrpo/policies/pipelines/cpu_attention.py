"""Attention on a CPU: three plain operations in place of torch's fused kernel, whose backward is several times slower.

Measured by `scripts/bench_overhead.py`. The scores of one call have to fit in memory; for small models they do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F

FUSED = F.scaled_dot_product_attention
LARGEST = 2**28  # scores of one call; above, the fused kernel's smaller memory counts for more


def plain(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """softmax(q k^T * scale + mask) v, [..., N, D], as `F.scaled_dot_product_attention`; what it lacks goes there."""
    size = query.shape[:-1].numel() * key.shape[-2]
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    if dropout_p or enable_gqa or is_causal or boolean or size > LARGEST:
        return FUSED(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    scores = (query * (scale or query.shape[-1] ** -0.5)) @ key.transpose(-1, -2)
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


@contextlib.contextmanager
def plain_on_cpu(device: torch.device) -> Iterator[None]:
    """Inside, attention is `plain` if `device` is a CPU; rollout and replay both run inside, so that they agree."""
    if device.type != "cpu":
        yield
        return
    F.scaled_dot_product_attention = plain
    try:
        yield
    finally:
        F.scaled_dot_product_attention = FUSED
