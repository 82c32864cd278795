"""Image reward of every frame of a clip; the mean or the worst score counts.

    reward:
      frames: {args: {reward: sharpness, frames: min}}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, Reward, about
from flowgrpo.rewards.failures import Failed, first_failed

if TYPE_CHECKING:
    from torch import Tensor

LIFTS = ("mean", "min")


@dataclass(frozen=True, eq=False)
class Frames:
    """Mean or minimum score of a clip's frames by a reward of pictures.

    None if that reward applies to no frame, Failed if it failed on one.

    reward: a name, or a function. args: arguments of a named one.
    every: score one of so many frames, beginning with the first.
    Raises UserError as `rewards.find` does, and if the reward does not judge pictures one by one.
    """

    reward: str | Reward
    frames: str = "mean"
    args: dict[str, Any] = field(default_factory=dict)
    every: int = 1
    about = About(modality="video", range=(None, None), needs="", licence="the reward's")

    def __post_init__(self) -> None:
        from flowgrpo.rewards.find import find
        from flowgrpo.rewards.pairwise import sees_groups

        if self.frames not in LIFTS or self.every < 1:
            raise UserError(f"reward 'frames': frames is {self.frames!r} and every {self.every}, expected "
                            f"{' or '.join(LIFTS)} and 1 or more")
        function = find(self.reward, self.args) if isinstance(self.reward, str) else self.reward
        modality = about(function).modality
        if sees_groups(function) or modality is not None and "image" not in modality.split("/"):
            raise UserError(f"reward 'frames': {self.reward!r} is no reward of single pictures: choose one that is")
        object.__setattr__(self, "reward", function)

    @property
    def made_of(self) -> list[str | Reward]:
        return [self.reward]

    def __call__(self, videos: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
                 ) -> list[float | None | Failed]:
        from flowgrpo.rewards.score import columns

        videos = videos[:, ::self.every]
        count = videos.shape[1]
        prompts = [prompt for prompt in prompts for _ in range(count)]
        metadata = [entry for entry in metadata for _ in range(count)]
        assert not isinstance(self.reward, str)  # found by its name at the start
        [scores] = columns({"of frames": self.reward}, videos.flatten(0, 1), prompts, metadata)
        return [self._lifted(scores[at:at + count]) for at in range(0, len(scores), count)]

    def _lifted(self, values: list[float | Failed]) -> float | None | Failed:
        if failed := first_failed(values):
            return failed
        scores = [value for value in values if not isinstance(value, Failed) and not math.isnan(value)]
        if not scores:
            return None
        return min(scores) if self.frames == "min" else sum(scores) / len(scores)
