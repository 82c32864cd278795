"""Rewards of clips: the motion by dense optical flow (DIS, Kroeger et al. 2016), and an image reward of every frame.

Lengths are shares of the shorter side of a frame, per frame, so that clips of different sizes compare. A static clip is
perfectly consistent: train `temporal_consistency` together with `flow_amount`, or gated by it.

    reward:
      frames: {args: {reward: sharpness, frames: min}}
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import numpy as np
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.packages import import_optional
from flowgrpo.rewards.about import About, RewardFunction, built_in
from flowgrpo.rewards.failures import Failed, first_failed
from flowgrpo.rewards.find import find
from flowgrpo.rewards.preprocessing import eight_bit, grey
from flowgrpo.rewards.reward import Batch, Reward, as_reward
from flowgrpo.rewards.score import of_batch

LICENCE = "Apache-2.0"
LIFTS: dict[str, Callable[[list[float]], float]] = {"mean": lambda scores: sum(scores) / len(scores), "min": min}


def flows(videos: Tensor) -> list[np.ndarray]:
    """Flow from each frame to the next [F-1, H, W, 2] in pixels (right, down), for videos [B, F, 3, H, W] in [0, 1].
    Raises UserError for clips of one frame, and without OpenCV."""
    cv2 = import_optional("cv2", "video", "optical flow")
    if videos.ndim != 5 or videos.shape[1] < 2:
        raise UserError(f"optical flow of videos of shape {list(videos.shape)}: expected [B, F, 3, H, W] with at least "
                        "two frames")
    method = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    method.setFinestScale(0)  # full resolution: at half, small objects of small clips come out too slow
    frames = (grey(videos).numpy() * 255).round().clip(0, 255).astype(np.uint8)
    return [np.stack([method.calc(one, other, None) for one, other in zip(clip, clip[1:])]) for clip in frames]


@built_in("temporal_consistency", "flicker smooth steady jitter")
class TemporalConsistency:
    """Temporal consistency: 1 minus the mean difference between a frame and the next one, warped back by the flow.

    Pixels that leave the image do not count. A static clip has 1.
    """

    about = About(modality="video", range=(0, 1), needs="video", licence=LICENCE)

    def __post_init__(self) -> None:
        import_optional("cv2", "video", "reward 'temporal_consistency'")

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> list[float]:
        return [float(1 - np.mean([_difference(*step) for step in zip(clip, clip[1:], flow)]))
                for clip, flow in zip(eight_bit(videos), flows(videos))]


def _difference(one: np.ndarray, other: np.ndarray, flow: np.ndarray) -> float:
    """Mean absolute difference in [0, 1] of two frames, bytes [H, W, 3], along a flow [H, W, 2]."""
    import cv2

    h, w = flow.shape[:2]
    target = flow + np.stack(np.meshgrid(np.arange(w), np.arange(h)), -1).astype(np.float32)
    warped = cv2.remap(other.astype(np.float32), target, None, cv2.INTER_LINEAR)  # type: ignore[call-overload]
    inside = ((target >= 0) & (target <= [w - 1, h - 1])).all(-1)
    return float(np.abs(warped - one)[inside].mean() / 255) if inside.any() else 1.0


@built_in("frames", "video image reward", eq=False)
class Frames(Reward):
    """Mean or minimum score of a clip's frames by a reward of images.

    None if that reward applies to no frame, Failed if it failed on one.

    reward: a name, or a function. args: arguments of a named one.
    every: score one of so many frames, beginning with the first.
    Raises UserError as `rewards.find` does, and if the reward does not judge images one by one.
    """

    reward: str | RewardFunction
    frames: str = "mean"
    args: dict[str, Any] = field(default_factory=dict)
    every: int = 1
    about = About(modality="video", range=(None, None), needs="", licence="the reward's")

    def __post_init__(self) -> None:
        if self.frames not in LIFTS or self.every < 1:
            raise UserError(f"reward 'frames': frames is {self.frames!r} and every {self.every}, expected "
                            f"{' or '.join(LIFTS)} and 1 or more")
        function = find(self.reward, self.args) if isinstance(self.reward, str) else self.reward
        made = as_reward(function, "of frames")
        if made.unit != "sample" or "image" not in made.judges:
            raise UserError(f"reward 'frames': {self.reward!r} is no reward of single images: choose one that is")
        vars(self).update(reward=function, judges=["video"], parts=[made])

    def __call__(self, batch: Batch) -> list[float | None | Failed]:
        videos = batch.samples[:, ::self.every]
        count = videos.shape[1]
        frames = Batch(videos.flatten(0, 1), [prompt for prompt in batch.prompts for _ in range(count)],
                       [entry for entry in batch.metadata for _ in range(count)])
        [scores] = of_batch({"of frames": self.parts[0]}, frames)
        lifted: list[float | None | Failed] = []
        for at in range(0, len(scores), count):
            values = scores[at:at + count]
            known = [value for value in values if not isinstance(value, Failed) and not math.isnan(value)]
            lifted.append(first_failed(values) or (LIFTS[self.frames](known) if known else None))
        return lifted
