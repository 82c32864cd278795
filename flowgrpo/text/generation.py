"""Rollout of a language model, as a group of a method's parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowgrpo.methods.parts import GroupDraw
from flowgrpo.samplers import old_policy
from flowgrpo.text.samplers import decoding, groups


@dataclass(frozen=True)
class TextGeneration:
    """Rollout of a language model.

    decoding: temperature and cuts; of a masked model an `Unmasking`.
    draws: how the completions of a group are drawn.
    """

    decoding: decoding.Decoding = decoding.Decoding()
    draws: GroupDraw = groups.Independent()

    of_text: ClassVar[bool] = True
    # What the rollout of a pipeline alone can choose: one granularity, drawn by the present policy without previews.
    strides: ClassVar[tuple[int, ...]] = (1,)
    lag: ClassVar[old_policy.Lag] = old_policy.Lag()
    preview: ClassVar[None] = None
    pruning: ClassVar[None] = None
