"""Base class of advantage rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flowgrpo.types import Context


class AdvantageRule:
    """Comparison of the rewards of a group: base class."""

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        """Return the advantages [P, G]. rewards: [P, G, R], NaN where one does not apply; weights: [R]."""
        raise NotImplementedError

    def prompt_weights(self, memory: dict[str, Any], prompts: Sequence[str]) -> Tensor | None:
        """Return the sampling weights of prompts, [len(prompts)], from what it has learned; None: all are equal."""
        return None
