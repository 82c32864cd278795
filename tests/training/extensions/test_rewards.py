"""Hints on rewards: each on its condition, once, with the numbers."""

from __future__ import annotations

import pytest

from flowgrpo.advantages.group import Advantage
from flowgrpo.contrib.reward_weights import Influence
from flowgrpo.training.extensions import rewards
from tests.helpers import tiny


def test_one_reward_that_never_varies_and_one_of_another_scale_are_named_once(capsys):
    def large(images, prompts):
        return [float(1000 * (i % 4)) for i in range(len(prompts))]
    def small(images, prompts):
        return [0.25 * (i % 4) for i in range(len(prompts))]
    def constant(images, prompts):
        return [0.5] * len(prompts)
    functions = {"large": large, "small": small, "constant": constant}
    trainer = tiny.trainer(rewards=functions, reward={"large": 1.0, "small": 2.0, "constant": 1.0}, train__group=4,
                           parts={"advantage": {"type": "Advantage", "order": "rewards"}})
    lines: list[str] = []
    trainer.log = lines.append
    for trainer.epoch in range(2):
        trainer.run_epoch()
    silent, scale = [line for line in lines if "reward" in line]
    assert silent == ("epoch 1: reward 'constant' is the same for all samples of every group (mean 0.5), so that it "
                      "teaches nothing")
    # deviations of 0, 1, 2, 3: 1.291; times 1000, and 0.25 with the weight 2
    assert scale.startswith("epoch 1: reward 'large' varies by 1.29e+03 within groups and 'small' by 0.645, weights")


@pytest.mark.parametrize("scale, told", [("batch", True), ("group", False)])
def test_a_batch_whose_deviation_is_far_above_that_within_groups_is_told_once(scale, told):
    """One prompt of two scores 1 throughout; the others 0, 0.01, 0.02, 0.03."""
    def uneven(images, prompts):
        return [1.0 if prompt == prompts[0] else 0.01 * (i % 4) for i, prompt in enumerate(prompts)]
    trainer = tiny.trainer(rewards={"uneven": uneven}, reward="uneven", train__group=4, train__prompts=2,
                           train__micro_batch=8, parts={"advantage": {"type": "Advantage", "scale": scale,
                                                                      "order": "rewards"}})
    lines: list[str] = []
    trainer.log = lines.append
    for trainer.epoch in range(2):
        trainer.run_epoch()
    said = [line for line in lines if "the batch's deviation" in line]
    # 8 scores of 1, 1, 1, 1, 0, .01, .02, .03: .5268; within the group .01291
    assert [line.partition(" times ")[0] for line in said] == [
        "epoch 1: the batch's deviation of the rewards is 41"] * told
    assert all("+dynamic_sampling" in line and "scale: group" in line for line in said)


@pytest.mark.parametrize("rule, expected", [
    (Advantage(), False), (Advantage(order="gdpo"), False), (Advantage(order="rewards"), True),
    (Advantage(scale="none"), True), (Influence(), False)])
def test_rules_that_add_rewards_of_any_scale(rule, expected):
    assert rewards.adds(rule) is expected
