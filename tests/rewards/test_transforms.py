"""Transforms of scores, each against a table worked by hand; and that they are those of their reward alone."""

from __future__ import annotations

import math

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.config import validate
from flowgrpo.config.reward_rules import Clip, RewardRule, Threshold
from flowgrpo.errors import UserError
from flowgrpo.rewards import transforms

NAN = math.nan


def same(found: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=0, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("transform, scores, expected", [
    (Clip(clip=(0, 1)), [[-1.0, 0.25, 1.5, NAN]], [[0.0, 0.25, 1.0, NAN]]),
    (Threshold(threshold=0.5), [[0.4, 0.5, 0.6, NAN]], [[0.0, 1.0, 1.0, NAN]]),
    ("log", [[1.0, math.e, math.e**-2, NAN]], [[0.0, 1.0, -2.0, NAN]]),
    ("rank", [[3.0, 1.0, 2.0, 9.0, 4.0]], [[0.5, 0.0, 0.25, 1.0, 0.75]]),
    # 1 1 2 take the places 0 1 2: the ties stand at (0 + 1) / 2 of 2.
    ("rank", [[1.0, 2.0, 1.0]], [[0.25, 1.0, 0.25]]),
    ("rank", [[5.0, 5.0, 5.0]], [[0.5, 0.5, 0.5]]),
    ("rank", [[7.0, NAN, -7.0, NAN]], [[1.0, NAN, 0.0, NAN]]),
    ("rank", [[7.0, NAN], [NAN, NAN]], [[0.5, NAN], [NAN, NAN]]),
    # Every group for itself.
    ("rank", [[1.0, 2.0], [20.0, 10.0]], [[0.0, 1.0], [1.0, 0.0]]),
])
def test_a_transform_of_groups(transform, scores, expected):
    scores = torch.tensor(scores, dtype=torch.float64)
    before = scores.clone()
    same(transforms.apply(transform, scores), expected)
    same(scores, before.tolist())


@pytest.mark.parametrize("score", [0.0, -0.3])
def test_the_logarithm_refuses_what_is_not_above_0(score):
    with pytest.raises(ValueError, match=f"log of the score {score:g}, expected above 0: put a clip such as"):
        transforms.log(torch.tensor([[1.0, score, NAN]]))


def composed(**rules) -> dict:
    return {name: rewards.Composed(len, RewardRule(transform=transform)) for name, transform in rules.items()}


def test_each_reward_has_its_own_from_left_to_right_in_every_granularity():
    mine = composed(a=[Clip(clip=(0, 1)), "rank"], b=[], c=[Threshold(threshold=2)])
    scores = torch.tensor([[[3.0, 5, 1], [2, 6, 2]], [[0.5, 7, 3], [0.25, 8, 0]]]).repeat(1, 1, 2)
    before = scores.clone()
    # 3 and 2 are both 1 after the clip: they tie.
    expected = [[[0.5, 5, 0], [0.5, 6, 1]], [[1.0, 7, 1], [0.0, 8, 0]]]
    same(rewards.transformed(mine, scores), [[row * 2 for row in group] for group in expected])
    assert torch.equal(scores, before)


def test_without_transforms_scores_are_themselves():
    scores = torch.rand(2, 3, 2)
    plain = {"plain": len, "ruled": rewards.Composed(len)}
    same(rewards.transformed(plain, scores), scores.tolist())
    assert not any(map(rewards.transforms_of, plain.values()))
    assert rewards.transforms_of(composed(ocr=["log"])["ocr"]) == ["log"]


def test_a_refused_score_names_its_reward():
    with pytest.raises(UserError, match="^reward 'ocr': log of the score 0, expected above 0"):
        rewards.transformed(composed(ocr=["log"]), torch.zeros(1, 2, 1))


def test_the_notation_of_a_recipe():
    raw = {"reward": {"a": {"transform": [{"clip": [0, 1]}, "log", "rank", {"threshold": 0.5}]}}}
    assert validate(raw).trained["a"].transform == [Clip(clip=(0, 1)), "log", "rank", Threshold(threshold=0.5)]
