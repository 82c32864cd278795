"""Depth of reasoning: divergences by hand, and the layers of a tiny model."""

import math

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.errors import UserError
from flowgrpo.text.rewards.models import ReasoningDepth, depths, divergence
from tests.helpers import tiny_text


def test_the_divergence_of_two_distributions_by_hand():
    one = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.25, 0.25, 0.5]]).log()
    other = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.75, 0.25, 0.0]]).log()
    mixed = 0.5 * (0.25 * math.log(0.5) + 0.5 * math.log(2)) + 0.5 * 0.75 * math.log(1.5)
    assert divergence(one, other).tolist() == pytest.approx([0, math.log(2), mixed], abs=1e-6)


@torch.no_grad()
def test_a_layer_that_changes_nothing_has_no_depth():
    model, tokenizer = tiny_text.model(layers=3)
    reward = ReasoningDepth(model="given", layers=1, parts=(model, tokenizer))
    moving = reward(["12+3=", "4"], ["1+2=", "1+2="])
    assert all(0 < value < math.log(2) for value in moving)
    model.model.layers[-1].self_attn.o_proj.weight.zero_()
    model.model.layers[-1].mlp.down_proj.weight.zero_()
    assert reward(["12+3=", "4"], ["1+2=", "1+2="]) == pytest.approx([0, 0], abs=1e-6)
    assert ReasoningDepth(model="given", layers=2, parts=(model, tokenizer))(["4"], ["1+2="])[0] > 0


@torch.no_grad()
def test_the_last_step_alone_is_measured():
    model, tokenizer = tiny_text.model(layers=3)
    reward = ReasoningDepth(model="given", layers=2, ends="=", parts=(model, tokenizer))
    ids = tokenizer("1+2=")["input_ids"]
    steps = tokenizer("7-3=58=", add_special_tokens=False)["input_ids"]
    states = model(input_ids=torch.tensor([ids + steps]), output_hidden_states=True).hidden_states[-3:]
    every = depths(model, [state[0, len(ids) - 1:-1] for state in states])
    assert len(every) == 7
    whole, last, none = reward(["7-3=", "7-3=58=", ""], ["1+2="] * 3)
    assert whole == pytest.approx(every[:4].mean().item(), abs=1e-5)
    assert last == pytest.approx(every[4:].mean().item(), abs=1e-5) and none is None


def test_it_needs_a_policy_or_a_model():
    with pytest.raises(UserError, match="'reasoning_depth' reads the policy that is trained, and there is none"):
        rewards.find("reasoning_depth")(["1"], ["1+2="])
    with pytest.raises(UserError, match="layers is 0"):
        ReasoningDepth(layers=0)
