"""Motion of clips and PIQE: against computations block by block."""

import math

import numpy as np
import pytest
from scipy import ndimage

from flowgrpo.contrib.pixels import along, distortion, piqe
from flowgrpo.errors import UserError
from tests.rewards.test_quality import landscape, spoilt
from tests.rewards.test_quality import scored as scores
from tests.rewards.test_video_motion import scored, square


def test_the_direction():
    ways = ["right", "left", "up", "down", "right", "right"]
    clips = [square((3, 0))] * 4 + [square((2, 2)), square((0, 0))]
    right, left, up, down, diagonal, still = scored("flow_direction", clips, [{"direction": way} for way in ways])
    assert right > 0.95 and left < -0.95 and abs(up) < 0.15 and abs(down) < 0.15 and still == 0
    assert diagonal == pytest.approx(0.5**0.5, abs=0.1)


@pytest.mark.parametrize("moves, share", [
    ([(0.11, 0)] * 4, 1), ([(0.09, 0)] * 4, 0), ([(0, 0)] * 4, 0),  # a tenth of a pixel is no motion
    ([(3, 4), (0, 5)], 0.3), ([(3, 0), (-1, 0)], 0.5),  # longer moves count more
])
def test_the_share_of_the_motion_along_a_direction(moves, share):
    assert along(np.array(moves), np.array((1, 0))) == pytest.approx(share, abs=1e-12)


def test_a_direction_for_all_and_prompts_that_ask_for_none():
    clips = [square((0, 3))] * 2
    assert min(scored("flow_direction", clips, direction="down")) > 0.95
    asked, not_asked = scored("flow_direction", clips, [{"direction": "up"}, {}])
    assert asked < -0.95 and math.isnan(not_asked)
    with pytest.raises(UserError, match="the direction is 'sideways', expected left, right, up, down"):
        scored("flow_direction", clips, [{"direction": "sideways"}] * 2)


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


def test_piqe_of_mirrored_and_spoilt_images():
    for light in spoilt().values():
        assert distortion(light) == pytest.approx(block_by_block(light), rel=1e-9)
    light = landscape()[:90, :85]
    padded = np.vstack([np.hstack([light, light[:, :-12:-1]]), np.hstack([light, light[:, :-12:-1]])[:-7:-1]])
    assert padded.shape == (96, 96) and distortion(light) == pytest.approx(block_by_block(padded), rel=1e-9)
    pictures = spoilt()
    noisy, clean, flat = scores(piqe, pictures["noisy"], pictures["clean"], np.full((96, 96), 128.0))
    assert flat == 0 and noisy < clean - 0.1 and 0 <= noisy and clean <= 1
