"""Reward of recorded pairs: the preference in their file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, described

if TYPE_CHECKING:
    from torch import Tensor


@described(About(modality="image/text", range=(0, 1), needs="", licence="Apache-2.0"))
def preferred(outputs: Tensor | Sequence[str], prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
              group: int) -> list[float]:
    """1 for the side of a recorded pair that its file prefers, 0 for the other: only with `preferences`.

    The pair is a group, the chosen side first; the metadata holds the verdict.
    Raises UserError for sampled outputs.
    """
    if group != 2 or any("preferred" not in entry for entry in metadata):
        raise UserError("reward 'preferred' is what a file says of recorded pairs, and these samples are none: set "
                        "preferences to the file, or choose another reward")
    return [entry["preferred"] if row % 2 == 0 else 1 - entry["preferred"] for row, entry in enumerate(metadata)]


preferred.group = True  # type: ignore[attr-defined]  # functions take attributes
