"""Rewards of the starter's clips: motion and appearance as the prompt claims, read from the frames.

Every frame of a clip of the video starter's world (`flowgrpo.starter.motion`) is read as an image by
`flowgrpo.rewards.starter.scene.read`. The largest blob's centroid and size, frame by frame, are the track. `motion`
compares the track with the claimed motion and ignores the shape; `appearance` checks shape and colour and ignores the
track. As in `scene`, every criterion is a ramp from 0 (bad) to 1 (good enough), and

    motion == 1  exactly where  motion_graded == 1  exactly where every criterion is met.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.starter.scene import FLOOR, Reading, ramp, read
from flowgrpo.starter.motion import MOTIONS, Clip, parse
from flowgrpo.starter.scenes import SIZE

ABOUT = About(modality="video", range=(0, 1), needs="", licence="Apache-2.0")

# Ramps: (0 at, 1 from). Velocities in pixels per frame; growth is that of the logarithm of the square root
# of the area, per frame. Both are means over the clip; their unevenness is the largest deviation of a single step.
PACE = (0.0, 2.0)  # velocity; the slowest drawn clip has 3
HEADING = (-1.0, 0.96)  # cosine between the velocity and the claimed direction: within 16 degrees
DRIFT = (2.5, 0.7)  # velocity of an object that should stay; a growing triangle's centroid has 0.35
UNEVEN = (4.5, 1.3)  # of the velocity; a jolt of 5 pixels makes it 3.75
GROWTH = (-0.05, 0.06)  # towards the claimed change of size; the slowest drawn has 0.10
SWELL = (0.08, 0.03)  # growth of an object that should keep its size
PULSE = (0.25, 0.12)  # unevenness of the growth
EXTRA = (70, 16)  # pixels of other blobs in a frame

LEAST = 3  # frames: with two, an even pace is undefined


@dataclass(frozen=True)
class Track:
    """Object of a clip, frame by frame: centroids [F, 2] in pixels (x, y), and logarithms of its size [F].
    legible: in [0, 1], for one crisp blob of one paint per frame, of the same colour in all, on a clean ground."""

    centres: np.ndarray
    sizes: np.ndarray
    legible: float

    @property
    def velocities(self) -> np.ndarray:
        """Steps of the centroid [F - 1, 2] in pixels per frame."""
        return np.diff(self.centres, axis=0)

    @property
    def growths(self) -> np.ndarray:
        """Steps of the size's logarithm [F - 1]."""
        return np.diff(self.sizes)


def track(frames: Sequence[Reading]) -> Track | None:
    """Follow the largest blob through the frames of a clip; None if a frame has none."""
    if not all(frame.objects for frame in frames):
        return None
    first = [frame.objects[0] for frame in frames]
    extra = np.array([sum(blob.area for blob in frame.objects[1:]) for frame in frames])
    whole = [frame.ground * blob.crispness * blob.unity for frame, blob in zip(frames, first)]
    nearest = np.array([blob.colours.argmax() for blob in first])
    same = np.mean(nearest == nearest[0])
    return Track(np.array([blob.centre for blob in first]), 0.5 * np.log([blob.area for blob in first]),
                 float(np.mean(whole * ramp(extra, EXTRA)) * (FLOOR + (1 - FLOOR) * same)))


def read_clips(videos: Tensor | np.ndarray) -> tuple[tuple[Reading, ...], ...]:
    """Read every frame of videos, float [B, F, 3, 64, 64] in [0, 1]. Raises ValueError for other videos."""
    videos = torch.as_tensor(videos).detach().to("cpu", torch.float32)
    if videos.ndim != 5 or videos.shape[1] < LEAST or videos.shape[2:] != (3, SIZE, SIZE):
        raise ValueError(f"the motion reward got videos of shape {list(videos.shape)}, expected [B, F, 3, {SIZE}, "
                         f"{SIZE}] with at least {LEAST} frames: resize them first")
    return tuple(tuple(read(frame) for frame in clip) for clip in videos)


def _pair_with_claims(videos: Tensor | np.ndarray, prompts: Sequence[str]) -> list[tuple[tuple[Reading, ...], Clip]]:
    claims, seen = [parse(prompt) for prompt in prompts], read_clips(videos)
    if len(seen) != len(claims):
        raise ValueError(f"the motion reward got {len(seen)} videos and {len(claims)} prompts, expected one prompt for "
                         "each video")
    return list(zip(seen, claims))


@built_in("motion_graded", about=ABOUT)
def motion_graded(videos: Tensor | np.ndarray, prompts: Sequence[str]) -> list[float]:
    """Degree in [0, 1] to which each clip moves as its prompt claims; 1 exactly where `motion` is 1.

    legibility * course * size * evenness; the last three keep a quarter at their worst.

    videos: float [B, F, 3, 64, 64] in [0, 1], at least 3 frames; prompts: B strings.
    Raises ValueError for other videos, for another number of prompts, and for a prompt outside the grammar of
    `flowgrpo.starter.motion.parse`.
    """
    return [_grade(track(frames), MOTIONS[clip.motion]) for frames, clip in _pair_with_claims(videos, prompts)]


@built_in("motion", about=ABOUT)
def motion(videos: Tensor | np.ndarray, prompts: Sequence[str]) -> list[float]:
    """1.0 if a clip moves at an even pace as its prompt claims, otherwise 0.0.

    Arguments and errors are those of `motion_graded`.
    """
    return [float(grade == 1.0) for grade in motion_graded(videos, prompts)]


@built_in("appearance", about=ABOUT)
def appearance(videos: Tensor | np.ndarray, prompts: Sequence[str]) -> list[float]:
    """1.0 if every frame shows the claimed shape in the claimed colour and nothing else, otherwise 0.0.

    This is `scene` of every frame. Arguments and errors are those of `motion_graded`.
    """
    return [float(all(frame.ground == 1 and [(blob.shape, blob.colour) for blob in frame.objects]
                      == [(clip.shape, clip.colour)] for frame in frames))
            for frames, clip in _pair_with_claims(videos, prompts)]


def _grade(trail: Track | None, claim: tuple[int, int, int]) -> float:
    """Credit of a track for a claim: the signs of (x, y, size)."""
    if trail is None:
        return 0.0
    velocity, growth = trail.velocities.mean(0), trail.growths.mean()
    claimed, speed = np.array(claim[:2]), np.linalg.norm(velocity)
    course = ramp(speed, PACE) * ramp(velocity @ claimed / max(speed, 1e-6), HEADING) if claimed.any() else \
        ramp(speed, DRIFT)
    size = ramp(growth * claim[2], GROWTH) if claim[2] else ramp(abs(growth), SWELL)
    uneven = np.linalg.norm(trail.velocities - velocity, axis=1).max()
    evenness = ramp(uneven, UNEVEN) * ramp(np.abs(trail.growths - growth).max(), PULSE)
    return float(trail.legible * np.prod(FLOOR + (1 - FLOOR) * np.array([course, size, evenness])))
