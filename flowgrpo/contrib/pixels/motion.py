"""Speed and direction of a clip's motion, by dense optical flow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.packages import needed
from flowgrpo.rewards.about import About
from flowgrpo.rewards.video_motion import LICENCE, flows

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
STILL = 0.1  # pixels per frame, below which motion counts as none
FASTEST = 0.05  # share of the fastest pixels that give a clip's speed, as in VBench's dynamic degree (2311.17982)


def fastest(flow: np.ndarray) -> np.ndarray:
    """Return the flow [N, 2] of the fastest twentieth of the pixels of each step of a clip [F-1, H, W, 2]."""
    steps = flow.reshape(len(flow), -1, 2)
    count = max(1, int(FASTEST * steps.shape[1]))
    rows = np.argpartition(-np.linalg.norm(steps, axis=-1), count - 1, axis=1)[:, :count]
    return np.take_along_axis(steps, rows[..., None], 1).reshape(-1, 2)


@dataclass(frozen=True)
class FlowAmount:
    """Speed of a clip: mean of the fastest twentieth of its pixels, per frame, as a share of the shorter side."""

    about = About(modality="video", range=(0, None), needs="video", licence=LICENCE)

    def __post_init__(self) -> None:
        needed("cv2", "video", "reward 'flow_amount'")

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> list[float]:
        side = min(videos.shape[-2:])
        return [float(np.linalg.norm(fastest(flow), axis=-1).mean() / side) for flow in flows(videos)]


@dataclass(frozen=True)
class FlowDirection:
    """Share of a clip's motion in the wanted direction: 1 all of it, -1 all opposite, 0 across or none.

    direction: left, right, up or down; the metadata's `direction` comes first, and None is the score without either.
    The motion is that of the fastest twentieth of the pixels, on the screen: when a camera pans to the left, everything
    moves to the right.
    Raises UserError for another word.
    """

    direction: str | None = None
    about = About(modality="video", range=(-1, 1), needs="video", licence=LICENCE)

    def __post_init__(self) -> None:
        needed("cv2", "video", "reward 'flow_direction'")

    def __call__(self, videos: Tensor, prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        directions: list[Any] = [entry.get("direction", self.direction) for entry in metadata]
        if wrong := set(directions) - {None, *DIRECTIONS}:
            raise UserError(f"reward 'flow_direction': the direction is {wrong.pop()!r}, expected "
                            f"{', '.join(DIRECTIONS)}")
        rows = [i for i, way in enumerate(directions) if way is not None]
        scores: list[float | None] = [None] * len(directions)
        for i, flow in zip(rows, flows(videos[rows]) if rows else ()):
            scores[i] = along(fastest(flow), np.array(DIRECTIONS[directions[i]]))
        return scores


def along(moves: np.ndarray, way: np.ndarray) -> float:
    """Return the share of moves [N, 2] along a unit vector, in [-1, 1]; 0 for a still clip."""
    length = np.linalg.norm(moves, axis=-1).sum()
    return float((moves @ way).sum() / length) if length > STILL * len(moves) else 0.0
