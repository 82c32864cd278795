"""Rewards whose gradient is followed: how they say so, their sum, and what they may not return."""

import pytest
import torch

from flowgrpo.config.reward_rules import RewardRule
from flowgrpo.errors import UserError
from flowgrpo.rewards import Composed, differentiable, require_gradient, value


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


def test_they_say_so_themselves():
    require_gradient({"red": Composed(red), "bright": Bright()})
    with pytest.raises(UserError, match="reward 'len' is not differentiable"):
        require_gradient({"red": red, "len": len})
    with pytest.raises(UserError, match="reward 'red' has a transform"):
        require_gradient({"red": Composed(red, RewardRule(transform=["log"]))})


@pytest.mark.parametrize("rule", [RewardRule(on_error="skip"), RewardRule(timeout=5.0)])
def test_failures_cannot_be_passed_over(rule):
    with pytest.raises(UserError, match="reward 'red' has on_error or timeout"):
        require_gradient({"red": Composed(red, rule)})


def test_what_raises_is_told_in_one_line_with_its_place():
    """The usual mistake: numpy takes no tensor that carries a graph."""
    pictures = torch.rand(2, 3, 2, 2).requires_grad_()
    with pytest.raises(UserError) as caught:
        value({"odd": lambda images, prompts: images.numpy()}, {"odd": 1.0}, pictures, ["x", "y"], [{}, {}])
    told = str(caught.value)
    assert told.startswith("reward 'odd' raised on 2 samples that carry a graph (first prompt: 'x'): RuntimeError:")
    assert "test_reward_gradient.py, line" in told and "\n" not in told


@pytest.mark.parametrize("returned, told", [
    (lambda images: [1.0, 2.0], "returned a list"),
    (lambda images: images.mean((2, 3)), r"returned the shape \[2, 3\]"),
    (lambda images: images.detach().mean((1, 2, 3)), "returned numbers without a gradient"),
    (lambda images: images.mean((1, 2, 3)).to("meta"), "returned a tensor on the meta device"),
    (lambda images: images.sum((1, 2, 3)).log() * torch.inf, "returned NaN or an infinity")])
def test_what_carries_no_gradient_on_is_told(returned, told):
    pictures = torch.rand(2, 3, 2, 2).requires_grad_()
    with pytest.raises(UserError, match=told) as caught:
        value({"odd": lambda images, prompts: returned(images)}, {"odd": 1.0}, pictures, ["x", "y"], [{}, {}])
    assert "\n" not in str(caught.value)
