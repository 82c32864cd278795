"""The aesthetic predictors on a tiny random model, against computations of their own, one image at a time."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flowgrpo.errors import UserError
from flowgrpo.rewards import clip
from flowgrpo.rewards.clip import Aesthetic
from tests.helpers.tiny_scorers import by_pil, cropped_by_transformers, pictures


def test_the_perceptron_has_no_activations_and_the_numbers_of_its_checkpoints():
    head = clip.perceptron(6)
    assert list(head.state_dict()) == [f"{i}.{kind}" for i in (0, 2, 4, 6, 7) for kind in ("weight", "bias")]
    one, two = torch.randn(2, 6), torch.randn(2, 6)
    zero = head(torch.zeros(1, 6))
    assert torch.allclose(head(one + two), head(one) + head(two) - zero, atol=1e-6)  # affine


def embeddings(encoder, images) -> np.ndarray:
    """Normalised embeddings, one image at a time."""
    fit = cropped_by_transformers(32)
    with torch.no_grad():
        shown = torch.stack([by_pil(image, 32, fit) for image in images])
        embedded = torch.cat([encoder(pixel_values=one[None]).image_embeds for one in shown]).double()
    return (embedded / embedded.square().sum(1, keepdim=True).sqrt()).numpy()


@pytest.mark.parametrize("batch", [2, 32])
def test_the_perceptron_of_the_improved_predictor(pick, encoder, tmp_path, batch):
    torch.manual_seed(7)
    state = {f"layers.{key}": value for key, value in clip.perceptron(8).state_dict().items()}
    state["layers.7.bias"] += 5
    torch.save(state, tmp_path / "head.pth")
    images = pictures(5, 32, 67, seed=2)
    values = embeddings(encoder, images)
    for layer in (0, 2, 4, 6, 7):
        weight, bias = (state[f"layers.{layer}.{kind}"].double().numpy() for kind in ("weight", "bias"))
        values = values @ weight.T + bias
    reward = Aesthetic(pick[2], head=str(tmp_path / "head.pth"), device="cpu", batch_size=batch)
    assert reward(images, [""] * 5).tolist() == pytest.approx(values[:, 0].tolist(), abs=1e-5)


def test_linear_heads(pick, encoder, tmp_path):
    state = {"weight": torch.randn(1, 8), "bias": torch.tensor([4.0])}
    save_file(state, tmp_path / "linear.safetensors")
    images = pictures(3, 32, 32, seed=4)
    expected = embeddings(encoder, images) @ state["weight"].double().numpy()[0] + 4
    reward = Aesthetic(pick[2], head=str(tmp_path / "linear.safetensors"), device="cpu")
    assert reward(images, [""] * 3).tolist() == pytest.approx(expected.tolist(), abs=1e-5) and np.std(expected) > 0.01


@pytest.mark.parametrize("state, line", [
    ({"weight": torch.zeros(1, 6), "bias": torch.zeros(1)}, "gives 8 numbers, but the head"),
    ({"first.weight": torch.zeros(1, 8)}, "has first.weight, expected the tensors of a perceptron"),
    ({"layers.0.weight": torch.zeros(1024, 8)}, "give the checkpoint that was made for this reward"),
])
def test_a_wrong_head_is_told(pick, tmp_path, state, line):
    save_file(state, tmp_path / "wrong.safetensors")
    with pytest.raises(UserError, match=line):
        Aesthetic(pick[2], head=str(tmp_path / "wrong.safetensors"), device="cpu")
