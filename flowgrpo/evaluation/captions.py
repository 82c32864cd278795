"""The scores below samples that are shown: one that cannot be had is left out, and no picture is lost for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from flowgrpo import rewards
from flowgrpo.data import Prompt
from flowgrpo.errors import UserError


def captions(functions: dict[str, Any], samples: Any, prompts: Sequence[Prompt], base: torch.Tensor | None = None
             ) -> torch.Tensor:
    """`rewards.score` [N, R] of N samples, NaN for a reward that fails on them, which is told in a line."""
    texts, metadata, found = [p.text for p in prompts], [p.metadata for p in prompts], []
    for name, function in functions.items():
        try:
            found.append(rewards.score({name: function}, samples, texts, metadata, base=base))
        except UserError as error:
            print(f"left out: {error}", file=sys.stderr)
            found.append(torch.full((len(texts), 1), torch.nan))
    return torch.cat(found, 1)
