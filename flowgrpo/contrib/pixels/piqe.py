"""Quality of an image without a reference and without a model: PIQE, inverted so that more is better.

PIQE (Venkatanath et al. 2015, NCC, "Blind image quality evaluation using perception based features") judges blocks of
16 by 16 pixels that are not flat. An edge of the block with a flat stretch is a compression artefact; a block whose
middle is as rough as the rest is noise. Constants are those of the paper.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import ndimage
from torch import Tensor

from flowgrpo.rewards.about import About, described
from flowgrpo.rewards.preprocessing import grey

BLOCK, STRETCH = 16, 6  # pixels
ACTIVE, FLAT = 0.1, 0.1  # minimum variance of a block that counts; standard deviation of a flat stretch
WINDOW = 7 / 6  # standard deviation of the 7 x 7 Gaussian, in pixels


@described(About(modality="image", range=(0, 1), needs="", licence="Apache-2.0"))
def piqe(images: Tensor, prompts: Sequence[str]) -> list[float]:
    """Quality of an image, 1 - PIQE / 100 within [0, 1]: 1 without noise and blocks, 0 without any structure."""
    return [min(max(1 - distortion(np.round(255 * light)) / 100, 0.0), 1.0) for light in grey(images).numpy()]


def distortion(light: np.ndarray) -> float:
    """Return the PIQE of a luminance [H, W] from 0 to 255: 0 (good) to about 100 (bad)."""
    blocks = _blocks(_normalised(np.pad(light, [(0, -size % BLOCK) for size in light.shape], mode="symmetric")))
    variance = blocks.var((1, 2), ddof=1)
    active, variance = blocks[variance > ACTIVE], variance[variance > ACTIVE]
    harm = _artefact(active) * (1 - variance) + _noisy(active, variance) * variance
    return float(100 * (harm.sum() + 1) / (len(active) + 1))


def _normalised(light: np.ndarray) -> np.ndarray:
    """Return the mean-subtracted, contrast-normalised luminance."""
    def blurred(values: np.ndarray) -> np.ndarray:
        return ndimage.gaussian_filter(values, WINDOW, radius=3, mode="nearest")

    mean = blurred(light)
    return (light - mean) / (np.sqrt(np.abs(blurred(light**2) - mean**2)) + 1)


def _blocks(values: np.ndarray) -> np.ndarray:
    """Return the blocks [N, 16, 16] of [H, W]."""
    h, w = (size // BLOCK for size in values.shape)
    return values.reshape(h, BLOCK, w, BLOCK).swapaxes(1, 2).reshape(-1, BLOCK, BLOCK)


def _artefact(blocks: np.ndarray) -> np.ndarray:
    """True for each block with a flat stretch on one of its four edges."""
    edges = np.stack([blocks[:, 0], blocks[:, -1], blocks[:, :, 0], blocks[:, :, -1]], 1)
    stretches = np.lib.stride_tricks.sliding_window_view(edges, STRETCH, -1)
    return (stretches.std(-1, ddof=1) < FLAT).any((1, 2))


def _noisy(blocks: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """True for each block whose two middle columns are as rough as the others."""
    middle = [BLOCK // 2 - 1, BLOCK // 2]
    centre = blocks[:, :, middle].std((1, 2), ddof=1)
    around = np.delete(blocks, middle, 2).std((1, 2), ddof=1)
    ratio, sigma = centre / np.maximum(around, 1e-12), np.sqrt(variance)
    return sigma > 2 * np.abs(sigma - ratio) / np.maximum(sigma, ratio)
