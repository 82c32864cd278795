"""Selections that leave samples out before a group is compared, by hand."""

import pytest
import torch

from flowgrpo.advantages import group_relative
from flowgrpo.contrib.downsampling import Consistent, ResampleCorrect
from flowgrpo.errors import UserError
from flowgrpo.methods import validate
from flowgrpo.training import sampling
from flowgrpo.types import Context, RewardColumns, RunState
from tests.helpers import loop, tiny, tiny_runs

#           right, the process
SAMPLES = [(1, 0.9), (1, 0.1), (1, 0.5), (1, 0.7), (0, 0.8), (0, 0.2), (1, 0.3), (0, 0.4)]
REWARDS = torch.tensor([SAMPLES])
WEIGHTS = [1.0, 0.0]


def kept(part, rewards=REWARDS, epoch: int = 0) -> list[int]:
    context = Context(RunState(epoch), rewards=RewardColumns(["right", "process"], weights=WEIGHTS))
    return part.before(rewards, WEIGHTS, context)[0].nonzero().flatten().tolist()


def test_consistent_and_right_samples_stay_in_balance_and_of_the_best_quality():
    assert kept(Consistent(4, ("process",))) == [0, 3, 5, 7]
    assert kept(Consistent(6, ("process",))) == [0, 2, 3, 4, 5, 7]
    # three are wrong: one right sample more than that, and no more.
    assert kept(Consistent(8, ("process",))) == [0, 2, 3, 4, 5, 6, 7]
    found = [kept(ResampleCorrect(4, ("process",)), epoch=epoch) for epoch in range(60)]
    for places in found:
        right = [place for place in places if SAMPLES[place][0]]
        assert len(places) == 4 and right == ([0, 3] if len(right) == 2 else [0, 2, 3])
        assert len(right) == round(4 * 5 / 8)
    counts = [sum(place in places for places in found) for place in (4, 5, 7)]
    assert all(8 <= count for count in counts)  # wrong ones by lot: about 40 of 60 or 20, whatever their quality
    one = torch.tensor([[(1, 0.5)] + [(0, 0.5)] * 7])
    assert 0 in kept(ResampleCorrect(2, ("process",)), one) and len(kept(ResampleCorrect(2, ("process",)), one)) == 2
    alike = torch.tensor([[(0.0, 0.1 * place) for place in range(8)]])
    assert len(kept(ResampleCorrect(4, ("process",)), alike)) == 4
    assert kept(Consistent(4, ("process",)), alike) == [0, 1, 2, 3]


def test_what_is_left_out_is_neither_compared_nor_trained():
    parts = {"selection": {"type": "Consistent", "n": 2, "rewards": ["process"]},
             "advantage": {"scale": "none", "order": "rewards"}}
    settings = tiny.config(method="flow_grpo", parts=parts, reward={"right": 1.0, "process": {"weight": 0.0}})
    made = tiny.trainer(rewards={"right": tiny.red, "process": tiny.red}, method="flow_grpo", parts=parts,
                        reward={"right": 1.0, "process": {"weight": 0.0}})
    assert validate.resolve(settings, "flow").credit.selection == Consistent(2, ("process",))
    drawn, conditioning, scores = sampling.sample(made, made.prompts[:1])
    given = torch.tensor([[(1.0, 0.2), (1.0, 0.9), (0.0, 0.7), (0.0, 0.1)]])
    [credited] = loop.credit(made, drawn, given, conditioning.prompts)
    assert all(len(taken.parent) == 2 for taken in credited.transitions)
    expected = group_relative(torch.tensor([[1.0, 0.0]]), "none")[0]
    torch.testing.assert_close(credited.advantages[0], expected)


def test_a_reward_that_is_not_there_is_refused():
    parts = {"selection": {"type": "ResampleCorrect", "n": 2, "rewards": ["proces"]}}
    with pytest.raises(UserError, match="parts.selection.rewards: unknown reward 'proces'"):
        validate.resolve(tiny_runs.config("flow", "flow_grpo", parts), "flow")
    with pytest.raises(UserError, match="n is 9, expected at most the 4 samples"):
        validate.resolve(tiny_runs.config("flow", "flow_grpo", {"selection": {
            "type": "ResampleCorrect", "n": 9, "rewards": ["score"]}}), "flow")
