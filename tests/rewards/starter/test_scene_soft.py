"""The soft scene reward: it prefers what its prompt claims, and every image has a gradient."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flowgrpo.rewards import find, require_gradient, score
from flowgrpo.rewards.starter.scene import scene
from flowgrpo.rewards.starter.scene_soft import membership, overlaps, painted, scene_soft
from flowgrpo.starter.scenes import COLOURS, RELATIONS, SHAPES, TASKS, Claims, coverage, parse, render, sample_claims


def changed(claims: Claims, rng: np.random.Generator) -> Claims:
    """The claims with one fact changed: a shape, a colour, the number or the relation."""
    first, *others = claims.objects
    kinds = ["shape"] + ["colour"] * bool(first.colour) + ["number"] * (claims.task == "counting")
    kind = str(rng.choice(kinds + ["relation"] * bool(claims.relation)))
    if kind == "relation":
        return replace(claims, relation=str(rng.choice([each for each in RELATIONS if each != claims.relation])))
    free = {"shape": [each for each in SHAPES if each not in {claim.shape for claim in claims.objects}],
            "colour": [each for each in COLOURS if each != first.colour],
            "number": [each for each in (2, 3, 4) if each != first.count]}[kind]
    new = rng.choice(free)
    other = replace(first, **{"count" if kind == "number" else kind: int(new) if kind == "number" else str(new)})
    return replace(claims, objects=(other, *others))


def drawn(prompts: list[Claims], rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(np.stack([render(claims, rng) for claims in prompts])).float().movedim(3, 1)


@torch.no_grad()
def test_true_images_beat_those_with_one_fact_changed():
    """All of 204 pairs, of every task and kind of change; of 240 others all were right too."""
    rng = np.random.default_rng(7)
    claims = [sample_claims(rng, TASKS[i % len(TASKS)]) for i in range(204)]
    prompts = [each.caption() for each in claims]
    true = scene_soft(drawn(claims, rng), prompts)
    false = scene_soft(drawn([changed(each, rng) for each in claims], rng), prompts)
    assert (true > false).double().mean() >= 0.99
    assert true.min() > 0.5 and 0.7 < true.mean() <= true.max() <= 1 and false.min() >= 0 and false.mean() < 0.35


@pytest.mark.parametrize("prompt", ["a circle", "a red star", "three rings", "a cross left of a star",
                                    "a blue square and a black ring"])
def test_every_image_has_a_gradient(prompt):
    rng = np.random.default_rng(0)
    pictures = torch.stack([torch.ones(3, 64, 64), torch.full((3, 64, 64), 0.95), torch.zeros(3, 64, 64),
                            torch.from_numpy(rng.random((3, 64, 64))).float(), *drawn([parse(prompt)], rng)])
    pictures.requires_grad_()
    scores = scene_soft(pictures, [prompt] * len(pictures))
    scores.sum().backward()
    assert scores.isfinite().all() and pictures.grad.isfinite().all()
    assert (pictures.grad.flatten(1).norm(dim=1) > 1e-6).all()


def test_the_gradient_is_that_of_finite_differences():
    rng = np.random.default_rng(1)
    prompt, direction = "a red star left of a ring", torch.from_numpy(rng.standard_normal((3, 64, 64)))
    picture = drawn([parse(prompt)], rng)[0].double()
    def along(shift: float) -> float:
        return scene_soft((picture + shift * direction)[None], [prompt]).item()
    given = picture.clone().requires_grad_()
    scene_soft(given[None], [prompt]).backward()
    assert (given.grad * direction).sum().item() == pytest.approx((along(1e-7) - along(-1e-7)) / 2e-7, rel=1e-5)


def test_following_the_gradient_repaints_an_object():
    """A blue circle becomes a red one, as which the exact reward sees it too."""
    picture = drawn([parse("a blue circle")], np.random.default_rng(3)).requires_grad_()
    assert scene(picture, ["a blue circle"]) == [1.0]
    optimizer = torch.optim.Adam([picture], lr=0.03)
    for _ in range(40):
        optimizer.zero_grad()
        (-scene_soft(picture, ["a red circle"])).sum().backward()
        optimizer.step()
        with torch.no_grad():
            picture.clamp_(0, 1)
    assert scene(picture, ["a red circle"]) == [1.0] and scene_soft(picture, ["a red circle"]).item() > 0.75


def test_maps_by_hand():
    ground, red = torch.full((3,), 0.95, dtype=torch.float64), torch.tensor(COLOURS["red"], dtype=torch.float64)
    pictures = torch.stack([ground, red, (ground + red) / 2])[:, :, None, None].expand(3, 3, 2, 2)
    own = membership(pictures)[:, 0, 0, 0]
    expected = 1 / (1 + np.exp(-np.array([-0.5, 0.5, 0.0]) / 0.12))
    np.testing.assert_allclose(own, expected, atol=1e-10)
    far = ((red - 0.95).square().sum() / 0.35**2).item()
    np.testing.assert_allclose(painted(pictures)[:2, 0, 0], [0.0, far**2 / (far**2 + 1)], atol=1e-10)


def test_overlaps_are_intersection_over_union():
    """Of a square of one of the radii with its own template, in place and moved, summed pixel by pixel."""
    radius = 7.3 * 1.11**3
    mask = torch.from_numpy(coverage("square", radius, (30.5, 22.5)))
    for x, y in ((30, 22), (33, 20)):
        template = torch.from_numpy(coverage("square", radius, (x + 0.5, y + 0.5)))
        disc = torch.from_numpy(coverage("circle", 1.25 * radius / 0.97, (x + 0.5, y + 0.5)))
        found = overlaps(mask[None] / 2, mask)[0, SHAPES.index("square"), 3, y, x]
        union = template.sum() + (mask * (disc - template).clamp(min=0)).sum()
        torch.testing.assert_close(found, (mask * template).sum() / 2 / union, rtol=0, atol=1e-10)


def test_it_is_a_reward_like_others():
    reward = find("scene_soft")
    require_gradient({"scene_soft": reward})
    picture = drawn([parse("a red star")], np.random.default_rng(0))
    found = score({"soft": reward}, picture, ["a red star"], [{}])
    assert found.shape == (1, 1) and found[0, 0].item() == pytest.approx(scene_soft(picture, ["a red star"]).item())
    with pytest.raises(ValueError, match="got images of shape"):
        scene_soft(torch.ones(1, 3, 32, 32), ["a star"])
    assert scene_soft(torch.ones(0, 3, 64, 64), []).shape == (0,)
