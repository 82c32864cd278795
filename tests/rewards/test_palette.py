"""Colours of one's own: published coordinates, a mean by hand, and its gradient."""

import math

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.rewards.palette import oklab


def images(*colours):
    return torch.tensor(colours, dtype=torch.float64)[:, :, None, None]


def test_coordinates_are_the_published_ones():
    # Ottosson's page: white, and the primaries of sRGB.
    found = oklab(images((1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1))).flatten(1)
    expected = [[1.0, 0.0, 0.0], [0.628, 0.225, 0.126], [0.866, -0.234, 0.179], [0.452, -0.032, -0.312]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-3)


def test_pixels_count_by_the_nearest_colour():
    palette = rewards.find("palette", {"colours": ["#ff0000", "#FFFFFF"], "tolerance": 0.5})
    both = torch.cat([images((1, 0, 0), (0, 0, 1)), images((1, 1, 1), (1, 1, 1))], 3)
    blue, red, white = oklab(images((0, 0, 1), (1, 0, 0), (1, 1, 1))).flatten(1)
    distance = min((blue - red).norm(), (blue - white).norm()).item()
    found = palette(both, ["", ""])
    assert found.tolist() == pytest.approx([1.0, (math.exp(-(distance / 0.5) ** 2) + 1) / 2], abs=1e-9)


def test_its_gradient_is_that_of_a_finite_difference_and_finite_at_black():
    palette = rewards.find("palette", {"colours": ["#ff8800"], "tolerance": 0.4})
    given = (0.05 + 0.9 * torch.rand(1, 3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: palette(x, [""]), given.requires_grad_())
    black = torch.zeros(1, 3, 1, 1, requires_grad=True)
    palette(black, [""]).sum().backward()
    assert black.grad.isfinite().all()
