"""A denoiser compiled block by block: blocks are alike, so that one of each kind is compiled and the others reuse it.

Compiled graphs that record a gradient and those that do not round differently (5e-5 to 4e-4 in bf16), so that a
compiled policy samples in grad mode and drops the graph at every step: the first ratio is then exact again.
"""

from __future__ import annotations

import torch

KINDS = 64  # of graphs that one block may have: per shape, grad mode, adapter on or off


def blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """A denoiser's blocks, the entries of its module lists."""
    return [block for each in module.children() if isinstance(each, torch.nn.ModuleList) for block in each]


def compile_blocks(module: torch.nn.Module, backend: str = "inductor") -> int:
    """Compile the blocks of a denoiser; returns how many. Without one, all of it.

    Nothing is compiled before the first call. `compile_repeated_blocks` of diffusers raises where a class does not name
    its blocks, as SD3's.
    """
    limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    setattr(torch._dynamo.config, limit, max(KINDS, getattr(torch._dynamo.config, limit)))
    found = blocks(module) or [module]
    for block in found:
        block.compile(backend=backend)
    return len(found)
