"""Colour of an object, measured without a model from the pixels in the middle of its box: hue, saturation and value.

Every pixel has one of GenEval's ten colours or none (grey, cyan); the object gets the most common one. Background
visible in the middle of the box counts too: a thin object on a wall of one colour gets the wall's colour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

NAMES = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
MIDDLE = 0.5  # of each side of the box
DARK, DULL_DARK, BRIGHT = 0.2, 0.35, 0.8  # value of any black, of a black without a hue; of white
PALE, DULL = 0.17, 0.12  # saturation, or difference of channels, below which there is no hue
HUES = (10, 40, 70, 165, 190, 258, 305, 336)  # degrees at which red, orange, ... end; the fifth is cyan, no name
BY_HUE = np.array(["red", "orange", "yellow", "green", "", "blue", "purple", "pink", "red"])
DIM = 0.68  # value below which orange, and a weak red, is brown
TENDER, STRONG = 0.55, 0.5  # saturation below which a bright red is pink; below which a dim one is brown


def colour(picture: np.ndarray, box: Sequence[float]) -> str | None:
    """Return the colour inside a box (left, top, right, bottom) of a picture, bytes [H, W, 3]; None for none of the
    ten, and for a box outside the picture."""
    names, counts = np.unique(pixel_colours(_middle(picture, box)), return_counts=True)
    return str(names[counts.argmax()]) or None if len(names) else None


def pixel_colours(pixels: np.ndarray) -> np.ndarray:
    """Return the colour names of bytes [..., 3], "" for none."""
    channels = np.asarray(pixels, dtype=np.float64) / 255
    high, spread = channels.max(-1), np.ptp(channels, -1)
    saturation, hue = spread / np.maximum(high, 1e-9), _hue(channels, high, spread)
    names = BY_HUE[np.searchsorted(HUES, hue, side="right")]
    brown = (high < DIM) & ((names == "orange") | (names == "red") & (saturation < STRONG))
    pink = (high > BRIGHT) & (names == "red") & (saturation < TENDER)
    names = np.select([brown, pink], ["brown", "pink"], names)
    grey = np.select([high < DULL_DARK, high > BRIGHT], ["black", "white"], "")
    names = np.where((saturation < PALE) | (spread < DULL), grey, names)
    return np.where(high < DARK, "black", names)


def _hue(channels: np.ndarray, high: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Return the hue in degrees in [0, 360), 0 for a grey."""
    red, green, blue = np.moveaxis(channels, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        sixth = np.select([high == red, high == green], [(green - blue) / spread % 6, (blue - red) / spread + 2],
                          (red - green) / spread + 4)
    return np.where(spread > 0, 60 * sixth, 0)


def _middle(picture: np.ndarray, box: Sequence[float]) -> np.ndarray:
    """Return the pixels [N, 3] in the middle of a box; none if it lies outside the picture."""
    parts = []
    for low, high, size in ((box[1], box[3], picture.shape[0]), (box[0], box[2], picture.shape[1])):
        centre, half = (low + high) / 2, MIDDLE * (high - low) / 2
        parts.append(slice(max(math.floor(centre - half), 0), min(max(math.ceil(centre + half), 0), size)))
    return picture[tuple(parts)].reshape(-1, 3)
