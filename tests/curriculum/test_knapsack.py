"""Samples shared out among prompts: the table of the paper's value, and groups of one prompt compared as one."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from flowgrpo.advantages.group import Pooled
from flowgrpo.curriculum.history import GradientVariance, gradient_norms, shared_out
from flowgrpo.curriculum.order import Knapsack, allocated, value
from flowgrpo.data.prompts import Prompt
from flowgrpo.types import Context, PromptGroups
from tests.helpers import loop, tiny_text

RATES = (0.05, 0.2, 0.5, 0.95)


def test_the_budget_goes_where_it_is_worth_most():
    assert allocated(RATES, 32, 1, least=2) == [10, 13, 7, 2]
    worth = sum(value(own, rate) for own, rate in zip((10, 13, 7, 2), RATES))
    assert worth == pytest.approx(0.262, abs=5e-4) and sum(value(8, rate) for rate in RATES) == pytest.approx(0.247,
                                                                                                           abs=5e-4)
    assert value(2, 0.5) == pytest.approx(0.5 * 0.125, abs=1e-12) and value(1, 0.3) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("size", [1, 2])
def test_one_unit_after_the_other_finds_the_best_of_all(size):
    rates, units = (0.1, 0.4, 0.8), 9
    found = allocated(rates, units, size)
    best = max((own for own in itertools.product(range(1, units), repeat=3) if sum(own) == units),
               key=lambda own: math.fsum(value(n * size, rate) for n, rate in zip(own, rates)))
    assert sum(found) == units and found == list(best)


def test_prompts_come_as_often_as_they_have_groups():
    pool = [Prompt(text) for text in "abcdefgh"]
    memory = {"beliefs": {"a": [1.0, 19.0], "b": [4.0, 16.0], "c": [10.0, 10.0], "d": [19.0, 1.0]}}
    found = Knapsack(each=4)(pool[:4], 16, 0, 0, None, memory, 2)
    asked = list(dict.fromkeys(found))
    rates = {"a": 0.05, "b": 0.2, "c": 0.5, "d": 0.95}
    assert [found.count(prompt) for prompt in asked] == allocated([rates[p.text] for p in asked], 16, 2)
    assert sorted(p.text for p in asked) == list("abcd") and found.count(pool[1]) > found.count(pool[3]) == 1
    assert len(set(Knapsack(each=4)(pool, 16, 0, 0, None, {}, 2))) == 4
    assert Knapsack(each=9)(pool, 3, 0, 0, None, {}, 2) == [Knapsack(each=9)(pool, 3, 0, 0, None, {}, 2)[0]] * 3


def test_groups_of_one_prompt_are_compared_as_one():
    rewards = torch.tensor([[1.0, 1.0], [0.0, 4.0], [0.0, 0.0]], dtype=torch.float64)[..., None]
    found = Pooled("none")(rewards, [2.0], Context(groups=PromptGroups(["x", "y", "x"])))
    assert found.tolist() == [[1, 1], [-4, 4], [-1, -1]]
    scaled = Pooled()(rewards, [1.0], Context(groups=PromptGroups(["x", "y", "x"])))
    assert scaled[0, 0].item() == pytest.approx(0.5 / (math.sqrt(1 / 3) + 1e-8), abs=1e-10)
    missing = torch.tensor([[1.0, math.nan], [0.0, 0.0]], dtype=torch.float64)[..., None]
    assert Pooled("none")(missing, [1.0], Context(groups=PromptGroups(["x", "x"]))).tolist() == [
        [pytest.approx(2 / 3), 0], [pytest.approx(-1 / 3)] * 2]


def test_an_epoch_learns_and_the_next_one_reads_it():
    trainer = tiny_text.trainer(tiny_text.policy(), method="grpo+knapsack_rl", train__prompts=4,
                                parts={"curriculum": {"each": 2}})
    for trainer.epoch in range(2):
        drawn = loop.draw(trainer).groups
        assert len(drawn.prompts) == 4 and len(set(drawn.prompts)) == 2
    assert 2 <= len(trainer.memory["beliefs"]) <= 4
    trainer.run_epoch()
    assert trainer.optimization.update == 1 and trainer.first_ratio.max_log_ratio <= 1e-5


# --- GVM -------------------------------------------------------------------------------------------------------------

def test_units_that_minimise_the_variance_by_hand():
    # 1 / sqrt(p + .001 / p): 3.78, 1.98 and 1.05 of 6.82 in all, of 48: 26.6, 14.0 and 7.4.
    assert shared_out((0.02, 0.25, 0.9), (1, 1, 1), 48, 1e-3, 2.0) == [27, 14, 7]
    assert shared_out((0.5, 0.5), (1, 3), 8, 1e-3, 2.0) == [2, 6]
    assert shared_out((0.5, 0.5, 0.5), (0, 1, 1), 9, 1e-3, 2.0) == [1, 4, 4]  # a prompt without gradient: the least
    assert shared_out((0.5, 0.5), (0, 0), 4, 1e-3, 2.0) == [2, 2]


def test_the_norm_of_a_gradient_by_the_logits_of_drawn_tokens():
    logp = torch.tensor([[0.5, 0.25, 0.9], [1.0, 1.0, 0.1]]).log()
    mask = torch.tensor([[True, True, False], [True, True, False]])
    assert gradient_norms(logp, mask).tolist() == pytest.approx([math.sqrt(0.25 + 0.5625), 0], abs=1e-6)


def test_norms_of_right_samples_decide_the_next_epochs_groups():
    pool = [Prompt("a"), Prompt("b"), Prompt("c"), Prompt("d")]
    part, memory = GradientVariance(each=4, keep=1.0), {}
    drawn = SimpleNamespace(pool=pool, prompts=pool[:2], totals=torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
                            norms=[torch.tensor([3.0, 9.0]), torch.tensor([9.0, 1.0])])
    part.learn(memory, drawn)
    assert memory["gradient_norms"] == {"a": 3.0, "b": 1.0}
    prompts = part(pool[:2], 8, 0, 0, None, memory, 2)  # as rare, a gradient three times as long
    assert [prompts.count(prompt) for prompt in pool] == [6, 2, 0, 0]
    part.learn(memory, SimpleNamespace(pool=pool, prompts=pool[:1], totals=torch.zeros(1, 2), norms=[torch.ones(2)]))
    assert memory["gradient_norms"]["a"] == 3.0  # nothing was right
    trainer = tiny_text.trainer(tiny_text.policy(), train__prompts=4, parts={
        "curriculum": {"type": "GradientVariance", "each": 2, "right": 0.0}, "advantage": {"type": "Pooled"}})
    trainer.run_epoch()
    assert trainer.memory["gradient_norms"] and min(trainer.memory["gradient_norms"].values()) > 0


@pytest.mark.parametrize("make", [lambda: GradientVariance(each=0), lambda: GradientVariance(keep=2.0),
                                  lambda: Knapsack(each=0), lambda: Knapsack(keep=2.0), lambda: Pooled("batch"),
                                  lambda: Pooled(clamp=0.0)])
def test_impossible_numbers(make):
    with pytest.raises(ValueError, match="is "):
        make()
