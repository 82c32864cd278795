"""Transforms of scores, each against a table worked by hand; and that they are those of their reward alone."""

import math

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.config import validate
from flowgrpo.config.reward_rules import Change, Clip, RewardRule, Threshold
from flowgrpo.errors import UserError
from flowgrpo.rewards.compose import apply_transform, log
from tests.helpers import loop, tiny_text
from tests.helpers.tables import f64

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
    same(apply_transform(transform, scores), expected)
    same(scores, before.tolist())


@pytest.mark.parametrize("score", [0.0, -0.3])
def test_the_logarithm_refuses_what_is_not_above_0(score):
    with pytest.raises(ValueError, match=f"log of the score {score:g}, expected above 0: put a clip such as"):
        log(torch.tensor([[1.0, score, NAN]]))


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


RISE = {"start": 0.2, "end": 0.8}


@pytest.mark.parametrize("transform, scores, expected", [
    ({"stretch": [0.25, 0.75]}, [[0.0, 0.25, 0.5, 0.75, 2.0, NAN]], [[0.0, 0.0, 0.5, 1.0, 1.0, NAN]]),
    ({"band": [0.4, 0.8], "margin": 0.2}, [[0.1, 0.3, 0.4, 0.8, 0.9, 1.0, NAN]], [[0.0, 0.5, 1, 1, 0.5, 0.0, NAN]]),
    ({"band": [1, 2]}, [[0.9, 1.0, 2.0, 2.1, NAN]], [[0.0, 1.0, 1.0, 0.0, NAN]]),
    ({"budget": 100}, [[0.0, 100.0, 150.0, 200.0, 999.0, NAN]], [[1.0, 1.0, 0.5, 0.0, 0.0, NAN]])])
def test_a_keyed_transform(transform, scores, expected):
    [made] = validate({"reward": {"a": {"transform": [transform]}}}).trained["a"].transform
    same(apply_transform(made, torch.tensor(scores, dtype=torch.float64)), expected)


@pytest.mark.parametrize("change, values", [
    (RISE, [0.2, 0.35, 0.5, 0.65, 0.8]), (RISE | {"until": 0.5}, [0.2, 0.5, 0.8, 0.8, 0.8]),
    (RISE | {"stages": 2}, [0.2, 0.2, 0.8, 0.8, 0.8]),
    ({"start": 16, "end": 1, "shape": "geometric"}, [16, 8, 4, 2, 1])])
def test_a_value_over_a_run(change, values):
    [made] = validate({"reward": {"a": {"transform": [{"threshold": change}]}}}).trained["a"].transform
    assert [made.threshold.at(share) for share in (0, 0.25, 0.5, 0.75, 1)] == pytest.approx(values)


def test_the_budgets_of_equal_factors():
    """256, 230, 207: 256 * 0.9^k in ten stages of one epoch each."""
    change = {"start": 256, "end": 256 * 0.9**9, "shape": "geometric", "stages": 10}
    [made] = validate({"reward": {"a": {"transform": [{"budget": change}]}}}).trained["a"].transform
    assert [round(made.budget.at(epoch / 9)) for epoch in range(4)] == [256, 230, 207, 187]
    same(apply_transform(made, torch.tensor([[256.0]]), 0.0), [[1.0]])
    same(apply_transform(made, torch.tensor([[256.0]]), 2 / 9), [[1 - (256 - 256 * 0.81) / (256 * 0.81)]])


def test_bounds_that_tighten_lower_scores_and_keep_their_order():
    rule = {"stretch": [{"start": 0.1, "end": 0.5}, {"start": 0.6, "end": 0.9}]}
    [made] = validate({"reward": {"a": {"transform": [rule]}}}).trained["a"].transform
    early, late = (apply_transform(made, f64([[0.2, 0.55, 0.7]]), share) for share in (0, 1))
    same(early, [[0.2, 0.9, 1.0]])
    same(late, [[0.0, 0.125, 0.5]])


@pytest.mark.parametrize("transform, message", [
    ({"clip": [{"start": 0, "end": 2}, 1]}, "the lower bound below the upper one, throughout the run"),
    ({"budget": {"start": 5, "end": 0}}, "a budget above 0"),
    ({"threshold": {"start": 0, "end": 1, "shape": "geometric"}}, "of the same sign, neither of them 0"),
    ({"threshold": {"start": 0, "ende": 1}}, "unknown key .*ende': did you mean 'end'")])
def test_a_change_that_cannot_be(transform, message):
    with pytest.raises(UserError, match=message):
        validate({"reward": {"a": {"transform": [transform]}}})


def test_a_run_moves_a_threshold_from_its_first_epoch_to_its_last():
    composed = rewards.Composed(tiny_text.short, RewardRule(transform=[Threshold(threshold=Change(start=1, end=3))]))
    trainer = tiny_text.trainer(rewards={"short": composed}, train__epochs=3)
    progress = []
    for trainer.epoch in range(3):
        loop.draw(trainer)
        progress.append(trainer.scoring.progress)
        same(trainer.scoring.shaped(torch.tensor([[[1.0], [2.0], [3.0]]])).flatten(),
             [float(score >= 1 + trainer.epoch) for score in (1, 2, 3)])
    assert progress == [0, 0.5, 1]
