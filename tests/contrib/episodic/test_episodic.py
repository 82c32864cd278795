"""Bonuses from the memory of earlier epochs, by hand."""

import json

import pytest
import torch

from flowgrpo.contrib.episodic import Episodic
from flowgrpo.types import Context, PromptGroups, RewardColumns, RunState


def of_epoch(prompt, epoch, memory):
    rewards = RewardColumns(["right", "shape"], [1.0, 0.0])
    return Context(RunState(epoch, memory=memory), rewards, PromptGroups([prompt]))


def shaped(part, values, epoch, memory, right=0.0):
    """The bonuses of samples described by `values` [G], whose total reward is `right`."""
    rewards = torch.tensor([[[right, value] for value in values]])
    context = of_epoch("a prompt", epoch, memory)
    return (part(rewards, context)[0, :, 0] - right).tolist()


def test_novelty_is_the_distance_to_the_nearest_of_earlier_epochs():
    memory, part = {}, Episodic(("shape",), explore=1.0, exploit=1.0, nearest=2)
    assert shaped(part, [0.0, 1.0, 5.0], 0, memory) == [0, 0, 0]
    memory = json.loads(json.dumps(memory))  # as a checkpoint keeps it
    for _ in range(2):  # a repeated call of the epoch starts from the epochs before
        assert shaped(part, [0.0, 3.0, 5.0], 1, memory) == pytest.approx([0.5, 2.0, 2.0])
    assert shaped(Episodic(("shape",), 1.0, nearest=1), [0.0, 3.0, 4.0], 2, memory) == pytest.approx([0, 0, 1.0])


def test_nearness_to_a_success_falls_with_the_distance():
    memory, part = {}, Episodic(("shape",), explore=0.0, exploit=0.5)
    assert shaped(part, [2.0, 4.0], 0, memory, right=1.0) == [0, 0]
    assert shaped(part, [2.0, 3.0, 7.0], 1, memory) == pytest.approx([0.5, 0.25, 0.125])


def test_the_memory_is_bounded_and_per_prompt():
    memory, part = {}, Episodic(("shape",), size=3)
    for epoch in range(4):
        shaped(part, [float(epoch), 10.0 + epoch], epoch, memory)
    assert [row[0] for row in memory["Episodic"]["a prompt"]["past"]] == [11.0, 2.0, 12.0]
    rewards = torch.tensor([[[0.0, 5.0]]])
    context = of_epoch("another", 4, memory)
    assert part(rewards, context).item() == 0


def test_a_sample_without_a_description_has_no_bonus_and_one_without_reward_none():
    memory, part = {}, Episodic(("shape",), explore=1.0, exploit=0.0, nearest=1)
    shaped(part, [0.0, 1.0], 0, memory)
    rewards = torch.tensor([[[0.5, torch.nan], [torch.nan, torch.nan], [0.5, 3.0]]])
    context = of_epoch("a prompt", 1, memory)
    found = part(rewards, context)[0, :, 0]
    assert found[0] == 0.5 and found[1].isnan() and found[2] == 2.5
