"""HPSv2 on a tiny random model, against computations of its own, one picture at a time."""

from __future__ import annotations

import pytest
import torch
from torchvision import transforms

from flowgrpo.rewards.about import lazily
from flowgrpo.rewards.find import find
from flowgrpo.rewards.hpsv2 import HpsV2
from flowgrpo.rewards.preprocessing import DEVIATION, MEAN
from tests.helpers.tiny_scorers import LEVEL, PROMPTS, by_pil, one_by_one, padded, pictures


def test_hps_v2_is_the_cosine_of_the_whole_picture(tiny):
    model, tokenizer, file = tiny
    images = pictures(5, 44, 90)
    expected = one_by_one(model, tokenizer, [by_pil(image, 32, padded(32)) for image in images], PROMPTS)
    reward = HpsV2(file, model="tiny-clip-of-tests", device="cpu", batch_size=2)
    assert torch.allclose(reward(images, PROMPTS).double(), expected, atol=2e-3)  # of one 8-bit step here and there
    assert expected.std() > 0.01
    ready = HpsV2(device="cpu", parts=(model, tokenizer))
    assert torch.allclose(ready(images, PROMPTS), reward(images, PROMPTS), atol=1e-6)


def test_both_versions_of_hps_v2_have_their_names(tiny):
    model, tokenizer, file = tiny
    images, options = pictures(2, 44, 90), {"model": "tiny-clip-of-tests", "device": "cpu"}
    one, two = (find(name, {"checkpoint": file, **options}) for name in ("hpsv2.0", "hpsv2.1"))
    assert torch.equal(one(images, PROMPTS[:2]), two(images, PROMPTS[:2]))
    with lazily():
        assert [find(name).checkpoint for name in ("hpsv2.0", "hpsv2.1")] == [
            "xswu/HPSv2/HPS_v2_compressed.pt", "xswu/HPSv2/HPS_v2.1_compressed.pt"]


@pytest.mark.parametrize("height, width", [(44, 90), (90, 64)])
def test_the_scaling_of_old_tables_has_no_filter(tiny, height, width):
    """The release's transform on a float tensor, as torchvision before 0.17 ran it."""
    images = pictures(2, height, width)
    scale = 32 / max(height, width)
    sides = [round(height * scale), round(width * scale)]
    small = transforms.functional.resize(images, sides, transforms.InterpolationMode.BICUBIC, antialias=False)
    left, top = 32 - sides[1], 32 - sides[0]
    square = torch.nn.functional.pad(small, (left // 2, left - left // 2, top // 2, top - top // 2))
    expected = transforms.functional.normalize(square, MEAN, DEVIATION)
    reward = HpsV2(device="cpu", parts=tiny[:2], antialias=False)
    torch.testing.assert_close(reward.prepare(images), expected, atol=1e-5, rtol=0)
    assert (expected - HpsV2(device="cpu", parts=tiny[:2]).prepare(images)).abs().max() > 20 * LEVEL
