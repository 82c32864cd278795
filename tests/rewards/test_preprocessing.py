"""Preparation of images for vision models, against PIL."""

import pytest
import torch
from torchvision import transforms

from flowgrpo.rewards.preprocessing import Preparation, resize_images
from tests.helpers.tiny_scorers import LEVEL, by_pil, cropped_by_transformers, drawings, padded, pictures

SIDES = [(64, 64), (48, 80), (81, 50), (20, 20), (32, 47), (17, 30), (32, 32)]


@pytest.mark.parametrize("height, width", SIDES)
def test_images_are_cropped_and_padded_as_by_pil(height, width):
    batch = pictures(3, height, width)
    for prepare, fitted in ((Preparation(32), ()), (Preparation(32, "longest"), (padded(32),))):
        apart = (prepare(batch) - torch.stack([by_pil(picture, 32, *fitted) for picture in batch])).abs()
        assert apart.shape == (3, 3, 32, 32) and apart.max() <= LEVEL and apart.mean() < LEVEL / 20


@pytest.mark.parametrize("crop, fitted", [("transformers", cropped_by_transformers(32)), ("torchvision", None)])
def test_an_odd_surplus_is_cropped_by_the_rule_of_the_package(crop, fitted):
    """67 pixels to 32: half the surplus is 17.5; torchvision's crop begins at 18, transformers' at 17."""
    batch = pictures(2, 32, 67)
    batch[..., ::2] = 1 - batch[..., ::2]  # stripes of one pixel
    expected = torch.stack([by_pil(picture, 32, *[fitted] * bool(fitted)) for picture in batch])
    other = {"transformers": "torchvision", "torchvision": "transformers"}[crop]
    assert (Preparation(32, crop=crop)(batch) - expected).abs().max() <= LEVEL
    assert (Preparation(32, crop=other)(batch) - expected).abs().max() > 20 * LEVEL


def test_images_are_scaled_and_rounded_as_by_torchvision():
    for picture in drawings():
        levels = (picture * 255).round().byte()
        sides = [picture.shape[-2] // 3, picture.shape[-1] // 4]
        expected = transforms.functional.resize(levels, sides, transforms.InterpolationMode.BICUBIC, antialias=True)
        assert torch.equal(resize_images(picture, sides, "bytes"), expected.float())
        assert (resize_images(picture, sides) - expected).abs().max() > 2  # PIL rounds after the width too
    batch = pictures(2, 40, 70)
    squash = transforms.Resize((32, 32), transforms.InterpolationMode.BICUBIC)
    expected = torch.stack([by_pil(picture, 32, squash) for picture in batch])
    assert (Preparation(32, "squash")(batch) - expected).abs().max() <= LEVEL
    levels = resize_images(pictures(4, 100, 90), (30, 27))
    assert levels.min() >= 0 and levels.max() <= 255 and torch.equal(levels, levels.round())
    grey = torch.full((1, 3, 8, 8), 0.6)
    prepared = Preparation(8, mean=(0.5, 0.4, 0.2), deviation=(0.1, 0.2, 0.5))(grey)
    assert prepared[0, :, 3, 3].tolist() == pytest.approx([1, 1, 0.8], abs=1e-6)
