"""The safety classifier: a tiny random one of the same classes, saved and loaded as a downloaded one is."""

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor
    torch.manual_seed(0)
    config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16,
                       patch_size=8, id2label={0: "normal", 1: "nsfw"}, label2id={"normal": 0, "nsfw": 1},
                       initializer_range=0.5)
    path = tmp_path_factory.mktemp("classifier")
    ViTForImageClassification(config).save_pretrained(path)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(path)
    return str(path)


def loaded(folder: str):
    from transformers import ViTForImageClassification
    return ViTForImageClassification.from_pretrained(folder).eval()


def test_the_score_is_the_probability_of_the_other_class(folder):
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():  # of its size already: only scaled to [-1, 1], of 256 steps
        expected = loaded(folder)((images * 255).round() / 127.5 - 1).logits.softmax(-1)[:, 0]
    reward = rewards.find("safety", {"model": folder, "device": "cpu"})
    found = rewards.score({"safety": reward}, images, [""] * 3, [{}] * 3)[:, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert found.std() > 0.01


def test_resized_and_many_images(folder):
    # An image of one colour is the same at every size.
    reward = rewards.find("safety", {"model": folder, "device": "cpu"})
    shades = torch.rand(4, 3, 1, 1, generator=torch.Generator().manual_seed(2))
    small, large = (reward(shades.expand(-1, -1, side, side), [""] * 4) for side in (16, 50))
    torch.testing.assert_close(small, large, rtol=0, atol=1e-5)
    reward = rewards.find("safety", {"model": folder, "device": "cpu"})
    images = torch.rand(35, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(reward(images, [""] * 35)[32:], reward(images[32:], [""] * 3), rtol=0, atol=1e-6)


def test_the_unsafe_classes_are_those_that_are_named(folder):
    both = rewards.find("safety", {"model": folder, "unsafe": ["NSFW", "normal"], "device": "cpu"})
    assert both(torch.rand(2, 3, 16, 16), [""] * 2).tolist() == pytest.approx([0, 0], abs=1e-6)
    with pytest.raises(UserError, match="unsafe is porn, but the classes of .* are normal, nsfw"):
        rewards.find("safety", {"model": folder, "unsafe": ["porn"]})


def test_weights_that_cannot_be_had(tmp_path):
    with pytest.raises(UserError, match="^reward 'safety': .* cannot be loaded .*: fetch it and give") as told:
        rewards.find("safety", {"model": str(tmp_path)})
    assert "\n" not in str(told.value)
