"""`likeness` on a tiny random DINOv2, beside transformers' own processor and cosines written out."""

import pytest
import torch
from PIL import Image

from flowgrpo.rewards.likeness import Likeness
from flowgrpo.rewards.preprocessing import read_tensor
from tests.helpers.refusals import message
from tests.helpers.tiny_scorers import as_pil, pictures


@pytest.fixture(scope="module")
def network():
    from transformers import Dinov2Config, Dinov2Model
    torch.manual_seed(0)
    return Dinov2Model(Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=224)).eval()


@pytest.fixture
def folder(tmp_path):
    """Two own images, one of them wide, and a file that is none."""
    for name, picture in (("a.png", pictures(1, 300, 300, seed=1)[0]), ("b.PNG", pictures(1, 256, 384, seed=2)[0])):
        as_pil(picture).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not an image")
    return tmp_path


def released(network, image: Image.Image) -> torch.Tensor:
    """The class token of an image by the processor of DINOv2's release, of unit length in float64."""
    from transformers import BitImageProcessor
    processor = BitImageProcessor(size={"shortest_edge": 256}, crop_size={"height": 224, "width": 224},
                                  image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225], resample=3)
    with torch.no_grad():
        found = network(processor(image, return_tensors="pt").pixel_values).pooler_output[0].double()
    return found / found.square().sum().sqrt()


def test_likeness_is_the_mean_cosine_to_the_own_images(network, folder):
    shown = pictures(3, 64, 64)
    reward = Likeness(images=str(folder), parts=(network,), device="cpu", batch_size=2)
    own = [released(network, Image.open(folder / name)) for name in ("a.png", "b.PNG")]
    for score, picture in zip(reward(shown, ["a"] * 3), shown):
        cosines = [released(network, as_pil(picture)) @ image for image in own]
        assert score.item() == pytest.approx((sum(cosines) / 2).item(), abs=1e-3)
    # An own image alone in the folder is like itself.
    (folder / "b.PNG").unlink()
    itself = read_tensor(folder / "a.png")[None]
    alone = Likeness(images=str(folder), parts=(network,), device="cpu")
    assert alone(itself, ["a"]).item() == pytest.approx(1, abs=1e-5)
    shown.requires_grad_(True)
    alone(shown, ["a"] * 3).sum().backward()
    assert shown.grad.abs().sum() > 0 and not any(weight.requires_grad for weight in network.parameters())


def test_a_folder_without_images_is_refused(network, tmp_path):
    for images in ("", str(tmp_path), str(tmp_path / "none")):
        assert "expected a folder with .png" in message(Likeness, images=images, parts=(network,))
