"""Rewards whose gradient is followed, and the gradients of model rewards."""

import pytest
import torch

from flowgrpo import run
from flowgrpo.config.reward_rules import RewardRule
from flowgrpo.data.prompts import Prompt
from flowgrpo.rewards import Composed, clip, differentiable, preprocessing, require_gradient, value
from flowgrpo.rewards.clip import Aesthetic, ClipScore, HpsV2, PickScore
from flowgrpo.rewards.image_reward import ImageReward
from flowgrpo.rewards.qwen2_vl import HpsV3
from tests.helpers import tiny as pipelines
from tests.helpers.refusals import message, refused
from tests.helpers.tiny_blip import released, tiny_network
from tests.helpers.tiny_scorers import pictures
from tests.rewards.test_qwen2_vl import release  # noqa: F401


@differentiable
def red(images, prompts):
    return images[:, 0].mean((1, 2))


class Bright:
    """Brightness times a factor of the prompt's."""

    differentiable = True

    def __call__(self, images, prompts, metadata):
        return images.mean((1, 2, 3)) * torch.tensor([entry["by"] for entry in metadata])


def test_the_weighted_sum_and_its_gradient():
    pictures = torch.rand(3, 3, 2, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    rules = {"red": Composed(red, RewardRule(weight=2.0)),
             "bright": Composed(Bright(), RewardRule(weight=0.5, when={"task": "b"}))}
    metadata = [{"task": "a", "by": 9.0}, {"task": "b", "by": 1.0}, {"task": "b", "by": 3.0}]
    total = value(rules, {"red": 2.0, "bright": 0.5}, pictures, ["x", "y", "z"], metadata)
    means = pictures.detach().mean((2, 3))
    expected = 2 * means[:, 0] + 0.5 * means.mean(1) * torch.tensor([0.0, 1, 3])
    torch.testing.assert_close(total.detach(), expected)
    total.sum().backward()
    channel = (torch.tensor([0.0, 1, 3]) / 24)[:, None].repeat(1, 3)
    channel[:, 0] += 0.5
    torch.testing.assert_close(pictures.grad, channel[:, :, None, None].expand(3, 3, 2, 2))


def test_rewards_say_whether_they_have_a_gradient():
    require_gradient({"red": Composed(red), "bright": Bright()})
    assert "reward 'len' is not differentiable" in message(require_gradient, {"red": red, "len": len})
    for rule, told in (({"transform": ["log"]}, "a transform"), ({"on_error": "skip"}, "on_error or timeout"),
                       ({"timeout": 5.0}, "on_error or timeout")):
        assert f"reward 'red' has {told}" in message(require_gradient, {"red": Composed(red, RewardRule(**rule))})


@pytest.mark.parametrize("returned, told", [
    # The usual mistake: numpy takes no tensor that carries a graph.
    (lambda images: images.numpy(), r"^reward 'odd' raised on 2 samples that carry a graph \(first prompt: 'x'\): "
                                    r"RuntimeError:.*test_gradient.py, line"),
    (lambda images: [1.0, 2.0], "returned a list"),
    (lambda images: images.mean((2, 3)), r"returned the shape \[2, 3\]"),
    (lambda images: images.detach().mean((1, 2, 3)), "returned numbers without a gradient"),
    (lambda images: images.mean((1, 2, 3)).to("meta"), "returned a tensor on the meta device"),
    (lambda images: images.sum((1, 2, 3)).log() * torch.inf, "returned NaN or an infinity")])
def test_what_carries_no_gradient_on_is_told(returned, told):
    odd, pictures = {"odd": lambda images, prompts: returned(images)}, torch.rand(2, 3, 2, 2).requires_grad_()
    refused(told, value, odd, {"odd": 1.0}, pictures, ["x", "y"], [{}, {}])


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
    images, reward = pictures(3, 40, 48), made[kind]
    leaf = images.clone().requires_grad_()
    optimizer = torch.optim.Adam([leaf], 0.03)
    for _ in range(20):
        optimizer.zero_grad()
        (-reward(leaf, PROMPTS).mean()).backward()
        optimizer.step()
        leaf.data.clamp_(0, 1)
    spread = reward(pictures(16, 40, 48, seed=9), [PROMPTS[0]] * 16).std()
    assert reward(leaf.detach(), PROMPTS).mean() > reward(images, PROMPTS).mean() + spread


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


def test_what_is_refused_before_weights_are_fetched_and_before_the_model_is_loaded(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr("flowgrpo.rewards.guards.load_parts", lambda *given, **more: fetched.append(given))
    assert "reward 'safety' is not differentiable" in message(
        run.run, pipelines.config(tmp_path, method="refl", reward="safety"))
    assert not fetched
    rule = {"aesthetic": {"args": {"model": "/no/folder", "head": "/no/head.pth"}}}
    assert "/no/head.pth cannot be loaded" in message(
        run.run, pipelines.config(tmp_path, method="refl", reward=rule), prompts=list(map(Prompt, pipelines.PROMPTS)))
