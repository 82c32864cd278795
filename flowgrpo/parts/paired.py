"""The advantage of edits: a sample against the very base that it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flowgrpo.advantages import require_clamp, weighted_sum, whitened
from flowgrpo.types import Context


@dataclass(frozen=True)
class Paired:
    """For groups of (base, its edit), (base, its edit), ...: the edit's reward less its base's, less the mean of these
    differences and over their deviation in the whole batch; 0 for a base, whose reward is the baseline.

    What bases differ in does not reach the edits. A pair of which one has no reward has advantage 0. ValueError for a
    group of an odd number.
    """

    clamp: float = 5.0

    def __post_init__(self) -> None:
        require_clamp(self.clamp)

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        total = weighted_sum(rewards, weights)
        if total.shape[1] % 2:
            raise ValueError(f"Paired: a group of {total.shape[1]}, expected pairs of a base and its edit")
        gains = total[:, 1::2] - total[:, ::2]
        advantages = total.new_zeros(total.shape)
        advantages[:, 1::2] = whitened(gains, ~gains.isnan())
        return advantages.clamp(-self.clamp, self.clamp)
