"""Progress of clean predictions, by hand."""

from __future__ import annotations

import pytest
import torch

from flowgrpo.advantages.token_credit import Progress, chosen_weights, progress
from flowgrpo.types import Context, RewardColumns, SampleMeasures

# Two samples of one prompt: the values before three trained steps, and the reward at the end.
VALUES, FINAL = torch.tensor([[[0.1, 0.4, 0.4], [0.5, 0.3, 0.2]]]), torch.tensor([[0.9, 0.6]])


def test_progress_telescopes_to_the_reward_less_the_first_value():
    steps = progress(VALUES, FINAL)
    torch.testing.assert_close(steps, torch.tensor([[[0.3, 0.0, 0.5], [-0.2, -0.1, 0.4]]]))
    assert steps[0, 0, 1] == 0  # a step that changes nothing
    torch.testing.assert_close(steps.sum(2), FINAL - VALUES[..., 0])


def test_discounts_by_hand():
    # 0.5: from the end, 0.5; 0 + 0.25; 0.3 + 0.125.
    torch.testing.assert_close(progress(VALUES, FINAL, 0.5)[0, 0], torch.tensor([0.425, 0.25, 0.5]))
    # 1: potential-based shaping, the reward less the potential of the state.
    torch.testing.assert_close(progress(VALUES, FINAL, 1.0), FINAL[..., None] - VALUES)


def test_a_missing_value_leaves_the_two_steps_beside_it_without_progress():
    values = VALUES.clone()
    values[0, 0, 1] = torch.nan
    assert progress(values, FINAL)[0, 0].isnan().tolist() == [True, True, False]


def test_the_rewards_that_are_named_score_the_end_too():
    rewards = torch.stack([FINAL, torch.tensor([[5.0, 7.0]])], 2)
    context = Context(rewards=RewardColumns(["red", "green"], [0.0, 2.0]), samples=SampleMeasures(predicted=VALUES))
    torch.testing.assert_close(Progress(rewards=("red",)).bonuses(rewards, context), progress(VALUES, FINAL))
    torch.testing.assert_close(Progress().bonuses(rewards, context), progress(VALUES, 2 * rewards[..., 1]))
    assert chosen_weights({"red": 0.0, "green": 2.0}, ["red"]) == {"red": 1.0}


@pytest.mark.parametrize("wrong", [{"weight": -1.0}, {"outcome": -0.1}, {"discount": 1.1}])
def test_settings_out_of_range(wrong):
    with pytest.raises(ValueError, match="Progress: weight is"):
        Progress(**wrong)
