"""Block-wise compilation of a denoiser: one block of each kind is compiled, and the others reuse it.

Compiled graphs with and without gradients round differently (5e-5 to 4e-4 in bf16). So a compiled policy samples in
grad mode and drops the graph at every step: the first ratio is then exact again.
"""

from __future__ import annotations

import torch

KINDS = 64  # most graphs per block: one per shape, grad mode, adapter on or off


def blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a denoiser's blocks, the entries of its module lists."""
    return [block for part in module.children() if isinstance(part, torch.nn.ModuleList) for block in part]


def compile_blocks(module: torch.nn.Module, backend: str = "inductor") -> int:
    """Compile the blocks of a denoiser and return their number; without blocks, compile all of it.

    Nothing is compiled before the first call. `compile_repeated_blocks` of diffusers raises if a class does not name
    its blocks, as SD3's.
    """
    limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    setattr(torch._dynamo.config, limit, max(KINDS, getattr(torch._dynamo.config, limit)))
    parts = blocks(module) or [module]
    for block in parts:
        block.compile(backend=backend)
    return len(parts)
