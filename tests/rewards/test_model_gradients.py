"""Gradients of model rewards by the images: scores unchanged to the bit, and higher after steps along them."""

import pytest
import torch

from flowgrpo import run
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.rewards import clip, preprocessing
from flowgrpo.rewards.clip import Aesthetic, ClipScore, HpsV2, PickScore
from flowgrpo.rewards.image_reward import ImageReward
from flowgrpo.rewards.qwen2_vl import HpsV3
from tests.helpers import tiny as pipelines
from tests.helpers.tiny_blip import released, tiny_network
from tests.helpers.tiny_scorers import pictures
from tests.rewards.test_hpsv3 import release  # noqa: F401

PROMPTS = ["a red cube", "two dogs", "a cat on a mat"]
KINDS = ("pick", "hps", "clip", "imagereward", "aesthetic")


@pytest.fixture(scope="module")
def made(tiny, pick, encoder, bert):
    torch.manual_seed(11)
    return {"pick": PickScore(device="cpu", parts=pick[:2], batch_size=2),
            "hps": HpsV2(device="cpu", parts=tiny[:2], batch_size=2),
            "clip": ClipScore(device="cpu", parts=tiny[:2], score="cosine"),
            "imagereward": ImageReward(device="cpu", parts=(tiny_network(released()), bert)),
            "aesthetic": Aesthetic(device="cpu", parts=(encoder, clip.perceptron(8)))}


def ascended(reward, images: torch.Tensor, prompts: list[str], steps: int, rate: float) -> tuple[float, float]:
    """The mean score before and after steps of Adam on the images."""
    leaf = images.clone().requires_grad_()
    optimizer = torch.optim.Adam([leaf], rate)
    before = reward(images, prompts).mean().item()
    for _ in range(steps):
        optimizer.zero_grad()
        (-reward(leaf, prompts).mean()).backward()
        optimizer.step()
        leaf.data.clamp_(0, 1)
    return before, reward(leaf.detach(), prompts).mean().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("height, width", [(32, 32), (40, 56)])
def test_scores_are_the_same_to_the_bit_with_a_gradient(made, kind, height, width):
    images = pictures(3, height, width)
    images = images + torch.rand(images.shape, generator=torch.Generator().manual_seed(1)) / 300  # between two levels
    leaf = images.clone().requires_grad_()
    scores = made[kind](leaf, PROMPTS)
    assert torch.equal(scores.detach(), made[kind](images, PROMPTS)) and not made[kind](images, PROMPTS).requires_grad
    scores.sum().backward()
    assert leaf.grad.isfinite().all() and (leaf.grad.flatten(1).norm(dim=1) > 0).all()
    networks = [part for part in made[kind].models if isinstance(part, torch.nn.Module)]
    assert not any(weight.requires_grad for network in networks for weight in network.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_steps_along_the_gradient_raise_the_score(made, kind):
    before, after = ascended(made[kind], pictures(3, 40, 48), PROMPTS, 20, 0.03)
    spread = made[kind](pictures(16, 40, 48, seed=9), [PROMPTS[0]] * 16).std().item()
    assert after > before + spread


def test_hps_v3_has_the_same_scores_with_a_gradient_and_rises_along_it(release):  # noqa: F811
    reward, images = HpsV3(**release[0]), pictures(2, 56, 56)
    leaf = images.clone().requires_grad_()
    scores = reward(leaf, PROMPTS[:2])
    assert torch.equal(scores.detach(), reward(images, PROMPTS[:2]))
    scores.sum().backward()
    moved = (images + 0.05 * leaf.grad.sign()).clamp(0, 1)
    assert (reward(moved, PROMPTS[:2]) > scores.detach()).all()


def test_the_gradient_of_resizing_is_that_of_its_unrounded_form():
    images = torch.rand(2, 3, 20, 24, generator=torch.Generator().manual_seed(2)) * 0.5 + 0.25
    leaf, plain = images.clone().requires_grad_(), images.clone().requires_grad_()
    toward = torch.randn(2, 3, 10, 12, generator=torch.Generator().manual_seed(3))
    (preprocessing.resize_images(leaf, (10, 12)) * toward).sum().backward()
    scaled = plain * 255
    for size in ((20, 12), (10, 12)):
        scaled = torch.nn.functional.interpolate(scaled, size, mode="bicubic", antialias=True)
    (scaled * toward).sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad)


@pytest.mark.fast
@pytest.mark.parametrize("kind, least", [("pick", 0.1), ("hps", 0.015), ("imagereward", 0.08), ("aesthetic", 0.003)])
def test_refl_raises_a_tiny_reward_model_in_every_epoch(made, kind, least):
    trainer = pipelines.trainer(rewards={"own": made[kind]}, method="refl", reward="own", train__epochs=6,
                                train__lr=2e-2)
    means = [trainer.run_epoch()["reward/own/mean"] for _ in range(6)]
    assert means == sorted(means) and means[-1] > means[0] + least


def test_a_reward_without_a_gradient_is_refused_before_its_weights_are_fetched(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr("flowgrpo.rewards.guards.load_pretrained", lambda *given, **more: fetched.append(given))
    with pytest.raises(UserError, match="reward 'safety' is not differentiable"):
        run.run(pipelines.config(tmp_path, method="refl", reward="safety"))
    assert not fetched


def test_the_weights_of_one_that_serves_are_still_demanded_before_the_model_is_loaded(tmp_path):
    rule = {"aesthetic": {"args": {"model": "/no/folder", "head": "/no/head.pth"}}}
    prompts = [Prompt(text) for text in pipelines.PROMPTS]
    with pytest.raises(UserError, match="/no/head.pth cannot be loaded"):
        run.run(pipelines.config(tmp_path, method="refl", reward=rule), prompts=prompts)
