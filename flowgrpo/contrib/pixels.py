"""Rewards of pixels without a model: PIQE of an image, inverted so that more is better, and a clip's motion by dense
optical flow.

PIQE (Venkatanath et al. 2015, NCC, "Blind image quality evaluation using perception based features") judges blocks of
16 by 16 pixels that are not flat. An edge of the block with a flat stretch is a compression artefact; a block whose
middle is as rough as the rest is noise. Constants are those of the paper.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import ndimage
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.packages import import_optional
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.preprocessing import grey
from flowgrpo.rewards.video_motion import LICENCE, flows

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
STILL = 0.1  # pixels per frame, below which motion counts as none
FASTEST = 0.05  # share of the fastest pixels that give a clip's speed, as in VBench's dynamic degree (2311.17982)


def fastest(flow: np.ndarray) -> np.ndarray:
    """Flow [N, 2] of the fastest twentieth of the pixels of each step of a clip [F-1, H, W, 2]."""
    steps = flow.reshape(len(flow), -1, 2)
    count = max(1, int(FASTEST * steps.shape[1]))
    rows = np.argpartition(-np.linalg.norm(steps, axis=-1), count - 1, axis=1)[:, :count]
    return np.take_along_axis(steps, rows[..., None], 1).reshape(-1, 2)


@built_in("flow_amount", "motion movement dynamic fast")
class FlowAmount:
    """Speed of a clip: mean of the fastest twentieth of its pixels, per frame, as a share of the shorter side."""

    about = About(modality="video", range=(0, None), needs="video", licence=LICENCE)

    def __post_init__(self) -> None:
        import_optional("cv2", "video", "reward 'flow_amount'")

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> list[float]:
        side = min(videos.shape[-2:])
        return [float(np.linalg.norm(fastest(flow), axis=-1).mean() / side) for flow in flows(videos)]


@built_in("flow_direction", "motion movement camera pan")
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
        import_optional("cv2", "video", "reward 'flow_direction'")

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
    """Share of moves [N, 2] along a unit vector, in [-1, 1]; 0 for a still clip."""
    length = np.linalg.norm(moves, axis=-1).sum()
    return float((moves @ way).sum() / length) if length > STILL * len(moves) else 0.0


BLOCK, STRETCH = 16, 6  # pixels
ACTIVE, FLAT = 0.1, 0.1  # minimum variance of a block that counts; standard deviation of a flat stretch
WINDOW = 7 / 6  # standard deviation of the 7 x 7 Gaussian, in pixels


@built_in("piqe", "noise blur artefact artifact iqa no-reference",
          About(modality="image", range=(0, 1), needs="", licence="Apache-2.0"))
def piqe(images: Tensor, prompts: Sequence[str]) -> list[float]:
    """Quality of an image, 1 - PIQE / 100 within [0, 1]: 1 without noise and blocks, 0 without any structure."""
    return [min(max(1 - distortion(np.round(255 * light)) / 100, 0.0), 1.0) for light in grey(images).numpy()]


def distortion(light: np.ndarray) -> float:
    """The PIQE of a luminance [H, W] from 0 to 255: 0 (good) to about 100 (bad)."""
    def blur(values: np.ndarray) -> np.ndarray:
        return ndimage.gaussian_filter(values, WINDOW, radius=3, mode="nearest")

    # Mean-subtracted, contrast-normalised luminance, in blocks [N, 16, 16] that are not flat.
    light = np.pad(light, [(0, -size % BLOCK) for size in light.shape], mode="symmetric")
    mean = blur(light)
    values = (light - mean) / (np.sqrt(np.abs(blur(light**2) - mean**2)) + 1)
    h, w = (size // BLOCK for size in values.shape)
    blocks = values.reshape(h, BLOCK, w, BLOCK).swapaxes(1, 2).reshape(-1, BLOCK, BLOCK)
    variance = blocks.var((1, 2), ddof=1)
    active, variance = blocks[variance > ACTIVE], variance[variance > ACTIVE]
    # An artefact is a flat stretch on one of a block's four edges.
    edges = np.stack([active[:, 0], active[:, -1], active[:, :, 0], active[:, :, -1]], 1)
    stretches = np.lib.stride_tricks.sliding_window_view(edges, STRETCH, -1)
    artefact = (stretches.std(-1, ddof=1) < FLAT).any((1, 2))
    # Noise is a block whose two middle columns are as rough as the others.
    middle = [BLOCK // 2 - 1, BLOCK // 2]
    centre = active[:, :, middle].std((1, 2), ddof=1)
    around = np.delete(active, middle, 2).std((1, 2), ddof=1)
    ratio, sigma = centre / np.maximum(around, 1e-12), np.sqrt(variance)
    noisy = sigma > 2 * np.abs(sigma - ratio) / np.maximum(sigma, ratio)
    harm = artefact * (1 - variance) + noisy * variance
    return float(100 * (harm.sum() + 1) / (len(active) + 1))
