"""Weights that adapt: tables by hand, and what they have to keep."""

from __future__ import annotations

import math

import pytest
import torch

from flowgrpo import methods
from flowgrpo.advantages.group import Advantage
from flowgrpo.advantages.reward_weights import Influence, adapted
from flowgrpo.methods import overlay
from tests.helpers.tables import close, f64

ONE, OTHER, NONE = [1, 1, -1, -1], [1, -1, 1, -1], [0, 0, 0, 0]  # advantages of a group of four: orthogonal, and silent


def columns(*each: list[int]) -> torch.Tensor:
    """Advantages or rewards [1, 4, R]."""
    return f64(each).T[None]


@pytest.mark.parametrize("each, weights, influence", [
    ((ONE, OTHER), [1, 1], [0.5, 0.5]),  # they leave each other alone
    ((ONE, NONE), [1, 1], [0.5, 0]),  # the second is saturated
    ((ONE, ONE, [-a for a in ONE]), [1, 1, 1], [1 / 3, 1 / 3, -1 / 3]),  # the third pulls against the others
    ((ONE, OTHER), [3, 1], [0.75, 0.25]), ((ONE, OTHER), [1, 0], [1, 0]),
])
def test_weights_move_by_their_influence(each, weights, influence):
    moved = [w * math.exp(2 * i) for w, i in zip(weights, influence)]
    close(adapted(columns(*each), f64(weights), 2), [sum(weights) * each / sum(moved) for each in moved])


def test_a_reward_that_is_saturated_in_some_groups_counts_by_the_others():
    advantages = torch.cat([columns(ONE, OTHER), columns(ONE, NONE), columns(ONE, NONE), columns(ONE, NONE)])
    moved = [math.exp(0.5), math.exp(0.5 / 4)]
    close(adapted(advantages, f64([1, 1]), 1), [2 * each / sum(moved) for each in moved])


def test_the_sum_is_under_the_adapted_weights():
    """(0, 0, 1, 1) has the deviation sqrt(1/3): advantages of +-sqrt(3)/2, whose square is 3/4, 3/8 under a half."""
    share = math.exp(0.375) / (math.exp(0.375) + 1)
    expected = 2 * share * math.sqrt(0.75)
    found = Influence()(columns([0, 0, 1, 1], [5, 5, 5, 5]), [1, 1])
    assert found[0].tolist() == pytest.approx([-expected, -expected, expected, expected], abs=1e-7)


def test_without_a_rate_it_is_the_weighted_sum_of_advantages():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(5, 6, 3, generator=generator, dtype=torch.float64)
    rewards[0, :2, 1] = torch.nan
    weights = [1.0, 0.5, 2.0]
    close(Influence(rate=0)(rewards, weights), Advantage()(rewards, weights).tolist())
    assert not torch.allclose(Influence(rate=3)(rewards, weights), Advantage()(rewards, weights))
    scaled = rewards * f64([10, 1, 100]) + 7  # the scale of a reward is of no consequence
    assert torch.allclose(Influence()(scaled, weights), Influence()(rewards, weights), atol=1e-6)
    assert Influence(clamp=0.5)(rewards, weights).abs().max() == 0.5


def test_weights_keep_their_sum_and_stay_finite():
    weights = adapted(columns(ONE, NONE) * 100, f64([1, 3]), 50)
    close(weights, [4, 0])
    assert (Influence()(columns(NONE, NONE), [1, 1]) == 0).all()


def test_a_recipe_names_it():
    method = overlay.with_parts(methods.preset("flow_grpo"), {"advantage": {"type": "Influence", "rate": 2}})
    assert method.credit.advantage == Influence(2)


@pytest.mark.parametrize("make, told", [
    (lambda: Influence(rate=-1), "rate is -1, expected 0 or more"), (lambda: Influence(clamp=0), "clamp is 0"),
    (lambda: Influence()(columns(ONE, OTHER), [1, -1]), "expected 0 or more, and one above"),
    (lambda: Influence()(columns(ONE, OTHER), [0, 0]), "expected 0 or more, and one above"),
    (lambda: Influence()(columns(ONE, OTHER), [1]), "one weight per reward"),
])
def test_what_cannot_be(make, told):
    with pytest.raises(ValueError, match=told):
        make()
