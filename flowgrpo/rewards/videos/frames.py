"""Image reward of every frame of a clip; the mean or the worst score counts.

    reward:
      frames: {args: {reward: sharpness, frames: min}}
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, RewardFunction
from flowgrpo.rewards.failures import Failed, first_failed
from flowgrpo.rewards.reward import Batch, Reward, as_reward

LIFTS = ("mean", "min")


@dataclass(frozen=True, eq=False)
class Frames(Reward):
    """Mean or minimum score of a clip's frames by a reward of pictures.

    None if that reward applies to no frame, Failed if it failed on one.

    reward: a name, or a function. args: arguments of a named one.
    every: score one of so many frames, beginning with the first.
    Raises UserError as `rewards.find` does, and if the reward does not judge pictures one by one.
    """

    reward: str | RewardFunction
    frames: str = "mean"
    args: dict[str, Any] = field(default_factory=dict)
    every: int = 1
    about = About(modality="video", range=(None, None), needs="", licence="the reward's")

    def __post_init__(self) -> None:
        from flowgrpo.rewards.find import find

        if self.frames not in LIFTS or self.every < 1:
            raise UserError(f"reward 'frames': frames is {self.frames!r} and every {self.every}, expected "
                            f"{' or '.join(LIFTS)} and 1 or more")
        function = find(self.reward, self.args) if isinstance(self.reward, str) else self.reward
        made = as_reward(function, "of frames")
        if made.unit != "sample" or "image" not in made.judges:
            raise UserError(f"reward 'frames': {self.reward!r} is no reward of single pictures: choose one that is")
        for name, value in (("reward", function), ("judges", ["video"]), ("parts", [made])):
            object.__setattr__(self, name, value)

    def __call__(self, batch: Batch) -> list[float | None | Failed]:
        from flowgrpo.rewards.score import of_batch

        videos = batch.samples[:, ::self.every]
        count = videos.shape[1]
        frames = Batch(videos.flatten(0, 1), [prompt for prompt in batch.prompts for _ in range(count)],
                       [entry for entry in batch.metadata for _ in range(count)])
        [scores] = of_batch({"of frames": self.parts[0]}, frames)
        return [self._lifted(scores[at:at + count]) for at in range(0, len(scores), count)]

    def _lifted(self, values: list[float | Failed]) -> float | None | Failed:
        if failed := first_failed(values):
            return failed
        scores = [value for value in values if not isinstance(value, Failed) and not math.isnan(value)]
        if not scores:
            return None
        return min(scores) if self.frames == "min" else sum(scores) / len(scores)
