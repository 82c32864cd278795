"""HPSv2 on a tiny random model, against computations of its own, one image at a time."""

import pytest
import torch

from flowgrpo.rewards.about import lazily
from flowgrpo.rewards.clip import HpsV2
from flowgrpo.rewards.find import find
from flowgrpo.rewards.preprocessing import DEVIATION, MEAN
from tests.helpers.tiny_scorers import LEVEL, PROMPTS, drawings, one_by_one, pictures, released_by_hps_v2


def test_hps_v2_is_the_cosine_of_the_whole_image(tiny):
    model, tokenizer, file = tiny
    images = pictures(5, 44, 90)
    expected = one_by_one(model, tokenizer, [released_by_hps_v2(image, 32) for image in images], PROMPTS)
    reward = HpsV2(file, model="tiny-clip-of-tests", device="cpu", batch_size=2)
    assert torch.allclose(reward(images, PROMPTS).double(), expected, atol=1e-6)
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


@pytest.mark.parametrize("antialias", [True, False])
def test_images_are_prepared_as_in_the_release(tiny, antialias):
    """antialias: as its transform is with torchvision from 0.17, and as it was before."""
    prepare = HpsV2(device="cpu", parts=tiny[:2], antialias=antialias).prepare
    expected = [released_by_hps_v2(image[0], 32, antialias) for image in drawings()]
    for image, one in zip(drawings(), expected):
        torch.testing.assert_close(prepare(image)[0], one, atol=1e-5, rtol=0)
    other = HpsV2(device="cpu", parts=tiny[:2], antialias=not antialias).prepare
    assert (other(drawings()[0])[0] - expected[0]).abs().max() > 20 * LEVEL


def test_edges_overshoot_as_in_the_release(tiny):
    white, black = ((1 - torch.tensor(MEAN)) / torch.tensor(DEVIATION), -torch.tensor(MEAN) / torch.tensor(DEVIATION))
    prepared = HpsV2(device="cpu", parts=tiny[:2]).prepare(pictures(2, 90, 64))
    assert (prepared > white[:, None, None] + LEVEL).any() and (prepared < black[:, None, None] - LEVEL).any()
