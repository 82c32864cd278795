"""Direction of clips whose motion is known."""

import math

import numpy as np
import pytest

from flowgrpo.contrib.pixels import along
from flowgrpo.errors import UserError
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
