"""Reward of the style of the starter's scenes: gradients against those of rendered ones."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from flowgrpo.rewards.find import find
from flowgrpo.rewards.starter.scene_soft import gradients, reference, scene_style
from flowgrpo.starter import scenes


def rendered(count: int, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    images = [scenes.render(scenes.sample_claims(rng, "two"), rng) for _ in range(count)]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float()


def test_gradients_by_hand():
    image = np.zeros((1, 3, 3, 3))
    image[0, :, 0, 1] = 0.3  # right of the first pixel and below it: (0.3, 0), (-0.3, -0.3), (0, 0), (0, 0)
    expected = np.histogram([0.3, 0.3 * 2**0.5, 0, 0], [0.0, *np.geomspace(0.01, 1.5, 12)])[0] / 4
    assert gradients(image) == pytest.approx(expected[None])
    image[0, 1:] = 0  # of one channel in three: a third of the length
    expected = np.histogram([0.1, 0.1 * 2**0.5, 0, 0], [0.0, *np.geomspace(0.01, 1.5, 12)])[0] / 4
    assert gradients(image) == pytest.approx(expected[None])


def test_the_coefficient_of_a_flat_image_is_the_root_of_the_flat_share():
    assert scene_style(torch.full((1, 3, 8, 8), 0.9), [""]) == pytest.approx([reference()[0][0]**0.5])
    assert reference()[0].sum() == pytest.approx(1)


def test_noise_blur_and_a_grain_that_the_eye_hardly_sees_lose():
    images = rendered(16, seed=7)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    blurred = torch.from_numpy(gaussian_filter(images.numpy(), (0, 0, 1.5, 1.5)))
    same, grain, blur = (np.mean(scene_style(each, [""] * 16)) for each in (
        images, (images + 0.03 * noise).clamp(0, 1), blurred))
    assert same > 0.95 and blur < 0.5 * same and grain < 0.25


def test_blur_lowers_it_of_grainy_images_too():
    """A model's images have a grain, which a blur removes: that alone would raise the score."""
    noise = 0.004 * torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    grainy = (torch.from_numpy(gaussian_filter(rendered(16, 9).numpy(), (0, 0, 0.6, 0.6))) + noise).clamp(0, 1)
    scores = [np.mean(scene_style(torch.from_numpy(gaussian_filter(grainy.numpy(), (0, 0, sigma, sigma))), [""] * 16))
              for sigma in (0, 0.5, 1, 2)]
    assert scores == sorted(scores, reverse=True) and scores[0] > 1.05 * scores[1] > 1.3 * scores[2]


def test_content_and_colour_are_none_of_it():
    images = rendered(4, seed=8)
    turned = scene_style(images.transpose(2, 3), [""] * 4)
    assert scene_style(images[:, [1, 2, 0]], ["a red ring"] * 4) == pytest.approx(scene_style(images, [""] * 4))
    assert scene_style(1 - images, [""] * 4) == pytest.approx(scene_style(images, [""] * 4), abs=1e-3)
    assert turned == pytest.approx(scene_style(images, [""] * 4), abs=0.02)


def test_it_is_found_by_its_name_and_says_what_it_got():
    assert find("scene_style") is scene_style
    with pytest.raises(ValueError, match=r"scene_style got images of shape \[3, 64, 64\], expected \[B, 3, H, W\]"):
        scene_style(torch.zeros(3, 64, 64), [""])
