"""PIQE: against a computation block by block, and images whose order is known."""

import numpy as np
import pytest
from scipy import ndimage

from flowgrpo.contrib.pixels import distortion, piqe
from tests.rewards.test_quality import landscape, scored, spoilt


def block_by_block(light: np.ndarray) -> float:
    """PIQE as its paper tells it, one block after another."""
    weights = np.exp(-0.5 * (np.arange(-3, 4) / (7 / 6))**2)
    kernel = np.outer(weights, weights) / weights.sum()**2
    mean = ndimage.correlate(light, kernel, mode="nearest")
    deviation = np.sqrt(np.abs(ndimage.correlate(light**2, kernel, mode="nearest") - mean**2))
    normal, harms = (light - mean) / (deviation + 1), []
    for top in range(0, len(light), 16):
        for left in range(0, light.shape[1], 16):
            block = normal[top:top + 16, left:left + 16]
            variance = block.var(ddof=1)
            if variance <= 0.1:
                continue
            edges = [block[0], block[15], block[:, 0], block[:, 15]]
            artefact = any(edge[i:i + 6].std(ddof=1) < 0.1 for edge in edges for i in range(11))
            around = np.concatenate([block[:, :7].ravel(), block[:, 9:].ravel()]).std(ddof=1)
            ratio, sigma = block[:, 7:9].std(ddof=1) / around, variance**0.5
            noise = sigma > 2 * abs(sigma - ratio) / max(sigma, ratio)
            harms.append(artefact * (1 - variance) + noise * variance)
    return 100 * (sum(harms) + 1) / (len(harms) + 1)


def test_piqe_is_that_of_its_paper():
    for light in spoilt().values():
        assert distortion(light) == pytest.approx(block_by_block(light), rel=1e-9)


def test_sides_that_are_no_multiple_of_sixteen_are_mirrored():
    light = landscape()[:90, :85]
    padded = np.vstack([np.hstack([light, light[:, :-12:-1]]), np.hstack([light, light[:, :-12:-1]])[:-7:-1]])
    assert padded.shape == (96, 96) and distortion(light) == pytest.approx(block_by_block(padded), rel=1e-9)


def test_a_spoilt_image_is_worse():
    pictures = spoilt()
    noisy, clean, flat = scored(piqe, pictures["noisy"], pictures["clean"], np.full((96, 96), 128.0))
    assert flat == 0 and noisy < clean - 0.1 and 0 <= noisy and clean <= 1
