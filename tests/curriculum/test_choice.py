"""Prompts chosen by categories, variance, gain, beliefs, rates and a knapsack: tables worked by hand, and runs."""

import itertools
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flowgrpo.advantages.group import Pooled, group_relative
from flowgrpo.config import Config
from flowgrpo.contrib.curricula import CategoryBandit, PredictedDifficulty, predict_rates
from flowgrpo.contrib.variants import Variations
from flowgrpo.curriculum import history, order
from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.curriculum.order import EpochPermutation, Knapsack, ThompsonSampling, allocate, value
from flowgrpo.curriculum.resampling import ExtraRollouts
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.data.selection import features
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.training import state
from flowgrpo.types import Context, PromptGroups
from tests.helpers import loop, tiny, tiny_runs, tiny_text
from tests.helpers.refusals import message

POOL = [Prompt(f"p{i}", metadata={"task": "abc"[i % 3]}) for i in range(12)]
NONE, HALF, ALL = [0.0] * 4, [0.0, 0.0, 1.0, 1.0], [1.0] * 4


def drawn(groups: list[tuple[Prompt, list[float]]], diversity: list[float] = (), epoch: int = 0) -> EpochBatch:
    batch, totals = EpochBatch(POOL, epoch, 10, 0, Processes()), torch.tensor([rewards for _, rewards in groups])
    batch.add([prompt for prompt, _ in groups], totals[..., None], totals, diversity)
    return batch


def test_values_and_confidence_of_categories_by_hand():
    part, memory = CategoryBandit(rate=0.25, temperature=0.5), {}
    part.learn(memory, drawn([(POOL[0], NONE), (POOL[1], HALF), (POOL[2], ALL)]))
    size = 0.5 / math.sqrt(1 / 3)  # |r - 1/2| over the deviation, ddof 1
    assert part.scores(memory, "abc") == [0, pytest.approx(0.25 * size), 0]
    part.learn(memory, drawn([(POOL[1], ALL), (POOL[4], HALF)]))  # mastered one of two: their mean
    assert part.scores(memory, "b") == [pytest.approx(0.75 * 0.25 * size + 0.25 * size / 2)]
    memory["categories"] = {"a": [0.0, 1, []], "b": [0.5, 1, []], "c": [1.0, 1, []]}
    odds = [math.exp(0), math.exp(1), math.exp(2)]
    assert part.probabilities(memory, "abc").tolist() == pytest.approx([each / sum(odds) for each in odds])
    part = CategoryBandit(window=3, bonus=1.0)
    memory = {"categories": {"a": [0.1, 100, []], "b": [0.8, 100, []], "c": [0.4, 2, []]}}
    assert part.scores(memory, "abc") == pytest.approx([0.424, 1.124, 2.282], abs=1e-3)
    memory = {}
    part.learn(memory, drawn([(POOL[0], HALF)] * 2))
    part.learn(memory, drawn([(POOL[0], NONE)] * 2))
    value, groups, last = memory["categories"]["a"]
    assert groups == 4 and len(last) == 3 and value == pytest.approx(0.5 / math.sqrt(1 / 3) / 3)


def test_prompts_come_from_the_likeliest_category():
    memory = {"categories": {"a": [0.0, 9, []], "b": [3.0, 9, []], "c": [0.0, 9, []]}}
    part = CategoryBandit(temperature=0.5)
    texts = [prompt.metadata["task"] for epoch in range(50) for prompt in part(POOL, 4, epoch, 0, None, memory, 4)]
    assert Counter(texts)["b"] > 180 and part(POOL, 4, 3, 0, None, memory, 4) == part(POOL, 4, 3, 0, None, memory, 4)
    assert len({prompt.text for prompt in CategoryBandit(temperature=1e-3)(POOL, 4, 0, 0, None, memory, 4)}) == 4
    with pytest.raises(UserError, match="parts.curriculum.key is 'kind'.*there are: task"):
        CategoryBandit(key="kind").check(loop.setup(Config(), prompts=POOL))


def test_the_score_of_variance_sampling_by_hand():
    part, memory = history.VarianceSampling(variance=1.0, diversity=0.5), {}
    eighth = [0.0] * 7 + [1.0]
    part.learn(memory, drawn([(POOL[0], [0.0] * 8), (POOL[1], [1.0] * 8), (POOL[2], eighth), (POOL[3], HALF * 2)],
                             [0.0, 0.4, 0.0, 1.0]))
    assert [part.score(memory, prompt) for prompt in POOL[:5]] == pytest.approx([0, 0.2, 7 / 64, 0.75, 0.75])
    assert history.VarianceSampling(share=0.0)(POOL, 5, 3, 1, None, memory, 8) == sets.draw(POOL, 5, 3, 1)
    part = history.VarianceSampling(share=1.0, variance=1.0, diversity=0.0)
    chosen = {prompt.text for epoch in range(30) for prompt in part(POOL, 4, epoch, 0, None, memory, 8)}
    assert chosen == {prompt.text for prompt in POOL} - {"p0", "p1"}
    half = history.VarianceSampling(variance=1.0, diversity=0.0)(POOL, 12, 0, 0, None, memory, 8)
    assert len({prompt.text for prompt in half}) == 12  # a share by score, and all others in turn


@pytest.mark.parametrize("made", [tiny_text.trainer, lambda **options: tiny.trainer(reward="red", **options)])
def test_a_run_measures_the_diversity_of_its_groups(made):
    options = {"rewards": {"red": lambda images, prompts: images[:, 0].mean((1, 2)).clamp(0, 1)}} \
        if made is not tiny_text.trainer else {}
    trainer = made(parts={"curriculum": {"type": "VarianceSampling"}}, **options)
    trainer.run_epoch()
    assert len(trainer.memory["diversity"]) == 2 == len(trainer.memory["rates"])
    assert np.mean([*trainer.memory["diversity"].values()]) == pytest.approx(
        trainer.scoring.metrics(torch.zeros(2, 4, 1), print)["diversity"])


def test_a_posterior_forgets_on_two_scales():
    part, memory = history.InformationGain(keep=0.5, others=0.75), {"beliefs": {"p0": [5.0, 3.0], "p1": [5.0, 9.0]}}
    part.learn(memory, drawn([(POOL[0], HALF), (POOL[0], ALL)]))
    assert memory["beliefs"]["p0"] == [0.5 * 5 + 0.5 + 6, 0.5 * 3 + 0.5 + 2]
    assert memory["beliefs"]["p1"] == [1 + 0.75 * 4, 1 + 0.75 * 8]
    sure = {"beliefs": {prompt.key: [1e7 * (i + 1), 1e7 * (19 - i)] for i, prompt in enumerate(POOL)}}
    assert history.InformationGain(candidates=9, power=1.0)(POOL, 1, 0, 0, None, sure, 4) == [POOL[9]]  # p = 10/20
    assert history.InformationGain(candidates=9, power=3.0)(POOL, 1, 0, 0, None, sure, 4) == [POOL[4]]  # p = 5/20
    # The published gain p (1 - p)^2 is largest at p = 1/3; 6/20 and 7/20 have .1470 and .1479.
    assert history.InformationGain(candidates=9)(POOL, 1, 0, 0, None, sure, 4) == [POOL[6]]
    for _ in range(6):  # a rate that moves from 0.1 to 0.6 is followed
        part.learn(memory, drawn([(POOL[1], [1.0, 1.0, 1.0, 0.0, 0.0])]))
    a, b = memory["beliefs"]["p1"]
    assert a / (a + b) == pytest.approx(0.6, abs=0.04)


def test_the_hardest_or_the_most_varied_prompts_are_retained():
    memory = {"rates": {"p0": [0.2, 0.8, 0.2], "p1": [0.1, 0.1, 0.1], "p2": [0.0, 0.0, 0.9], "p3": [1.0]}}
    hard = history.Retention(after=2, keep=2)
    assert hard(POOL, 3, 1, 5, None, memory, 4) == sets.draw(POOL, 3, 1, 5)
    assert {prompt.text for prompt in hard(POOL, 2, 2, 5, None, memory, 4)} == {"p0", "p1"}
    hard.learn(memory, drawn([(POOL[1], ALL)]))
    assert {prompt.text for prompt in hard(POOL, 2, 3, 5, None, memory, 4)} == {"p0", "p2"}
    one = history.Retention(after=1, by="variance")
    assert {prompt.text for prompt in one(POOL, 4, 1, 0, None, memory, 4)} == {"p2"}  # 0.18, of p0 0.08
    memory["rates"]["p0"] = [0.0, 1.0]
    assert {prompt.text for prompt in one(POOL, 4, 2, 0, None, memory, 4)} == {"p2"}  # chosen once


def test_rates_by_softmax_and_pairs_of_rare_outcomes_by_hand():
    memory = {"rates": {"p0": [1 / 8], "p1": [7 / 8], "p2": [0.0], "p3": [1.0], "p4": [0.5]}}
    pair = history.OppositePairs()(POOL, 4, 0, 0, None, memory, 8)
    assert [prompt.text for prompt in pair[:2]] == ["p0", "p1"] and len({prompt.text for prompt in pair}) == 4
    advantages = group_relative(torch.tensor([[1.0] + [0.0] * 7, [0.0] + [1.0] * 7]))
    assert advantages[0, 0] == -advantages[1, 0] == pytest.approx(7 / math.sqrt(8))
    assert history.OppositePairs()(POOL, 4, 3, 0, None, {}, 8) == sets.draw(POOL, 4, 3, 0)
    # "a cat" and "a dog" share one of three features, a cosine of 1/3: weights 1 and exp(-(2/3) / 0.5) of .9 and .1.
    other = math.exp(-(2 / 3) / 0.5)
    found = predict_rates(["a cat", "a dog"], ["a cat", "a dog"], [0.9, 0.1], 0.5)
    expected = [(0.9 + 0.1 * other) / (1 + other), (0.1 + 0.9 * other) / (1 + other)]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


def test_rates_are_predicted_from_similar_prompts():
    rates = {"red": 0.9, "blue": 0.5, "green": 0.1}
    texts = [f"{noun} {colour} {colour}" for colour in rates for noun in ("cat", "dog", "sun", "car", "ox", "pen")]
    known = texts[::6]
    guessed = predict_rates(texts, known, [rates[text.split()[1]] for text in known], 0.05)
    assert np.abs(guessed - [rates[text.split()[1]] for text in texts]).max() < 0.05
    assert features("A cat")[features("a cat") > 0].tolist() == pytest.approx([3 ** -0.5] * 3)
    pool, memory = [Prompt(text) for text in texts], {"rates": {text: [rates[text.split()[1]]] for text in known}}
    part = PredictedDifficulty(candidates=18, fresh=0.0, temperature=0.05)
    assert {prompt.text.split()[1] for prompt in part(pool, 5, 0, 0, None, memory, 4)} == {"blue"}
    part.learn(memory, drawn([(POOL[0], HALF)]))
    assert list(memory["rates"])[-1] == "p0" and part(pool, 5, 2, 0, None, {}, 4) == part(pool, 5, 2, 0, None, {}, 4)


def test_hard_prompts_get_further_groups():
    part = ExtraRollouts(most=3)
    sums = [2 * n * math.sqrt(p * (1 - p)) for n, p in ((8, 1 / 8), (8, 1 / 2), (12.095, 1 / 8))]
    assert sums == pytest.approx([5.2915, 8.0, 8.0], abs=1e-3)
    assert part.groups(1 / 8, 8, 4) == 1 and part.groups(1 / 8, 8, 1) == 3 and ExtraRollouts(9).groups(1 / 8, 8, 1) == 4
    assert [part.groups(rate, 8, 4) for rate in (0.0, 0.5, 0.9, 1.0)] == [3, 0, 0, 0]
    assert ExtraRollouts(20, "hardness").groups(1 / 8, 8, 1) == 13  # 8 (1.75 * 1.512 - 1) = 13.2
    batch = drawn([(POOL[0], NONE), (POOL[1], HALF), (POOL[0], [0.0, 0.0, 0.0, 1.0])])
    pairs = part(batch)
    assert pairs == [(None, POOL[0])] and batch.replace(pairs) == [POOL[0]] and batch.replaced == set()
    batch.add([POOL[0]], torch.zeros(1, 4, 1), torch.zeros(1, 4))
    assert part(batch) == [] and batch.metrics() == {"extra_groups": 1}


def test_further_groups_are_trained_and_compared_as_one():
    trainer = tiny_text.trainer(method="grpo", rewards={"short": lambda texts, prompts: [
        float(prompt == "1+2=" and place % 2) for place, prompt in enumerate(prompts)]},
        train__prompts=6, parts={"redraw": {"type": "ExtraRollouts", "most": 1}, "advantage": {"type": "Pooled"}})
    metrics = trainer.run_epoch()
    assert metrics["extra_groups"] == 5 and trainer.first_ratio.max_log_ratio <= 1e-5


PARTS = [{"type": "CategoryBandit", "key": "sign"}, {"type": "VarianceSampling"}, {"type": "InformationGain"},
         {"type": "Retention", "after": 1}, {"type": "OppositePairs"}, {"type": "PredictedDifficulty"},
         {"type": "ThompsonSampling"}]


@pytest.mark.parametrize("part", PARTS, ids=[part["type"] for part in PARTS])
def test_what_is_learned_is_in_the_checkpoint_and_the_next_epoch_is_the_same(part, tmp_path):
    def made():
        trainer = tiny_text.trainer(tiny_text.policy(), parts={"curriculum": part})
        trainer.prompts = [Prompt(text, metadata={"sign": text[1]}) for text in tiny_text.PROMPTS]
        return trainer
    trainer, other = made(), made()
    loop.draw(trainer)
    trainer.epoch, trainer.progress.saved_counters = 1, state.counters(trainer)
    tiny_runs.resume(trainer, other, tmp_path)
    assert other.memory == trainer.memory != {}
    assert trainer.method.curriculum(trainer.prompts, 2, 1, 0, None, trainer.memory, 4) == \
        other.method.curriculum(other.prompts, 2, 1, 0, None, other.memory, 4)


# --- SvS -------------------------------------------------------------------------------------------------------------
def test_variants_come_until_they_teach_nothing():
    part, memory, pool = Variations(share=0.5), {}, [Prompt(text) for text in "abcd"]
    assert [prompt.text for prompt in part(pool, 4, 0, 0, None, memory, 2)] == [
        prompt.text for prompt in sets.draw(pool, 4, 0, 0)]
    memory["variants"] = [{"prompt": text, "metadata": {"answer": text}} for text in ("v", "w", "x")]
    drawn = part(pool, 4, 0, 0, None, memory, 2)
    assert [prompt.text for prompt in drawn[:2]] == ["v", "w"] and drawn[0].metadata == {"answer": "v"}
    totals = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    part.learn(memory, SimpleNamespace(prompts=drawn, totals=totals))
    assert [line["prompt"] for line in memory["variants"]] == ["x", "v"]  # w is always solved


def test_the_policy_writes_variants_of_what_it_sometimes_solves():
    def odd(texts, prompts):
        return [float(place % 2) for place, _ in enumerate(texts)]
    trainer = tiny_text.trainer(rewards={"short": odd}, train__epochs=2, parts={
        "curriculum": {"type": "Variations", "template": "{prompt}{solution}", "share": 1.0}})
    trainer.prompts = [Prompt(text, metadata={"answer": text}) for text in tiny_text.PROMPTS]
    trainer.run_epoch()
    lines = list(trainer.memory["variants"])
    assert lines and all(line["metadata"]["answer"] in tiny_text.PROMPTS for line in lines)
    assert not {line["prompt"] for line in lines} & set(tiny_text.PROMPTS)
    trainer.epoch = 1
    drawn = loop.draw(trainer).groups
    assert [prompt.text for prompt in drawn.prompts][:len(lines)] == [line["prompt"] for line in lines][:2]


LARGE_POOL = [Prompt(f"p{i}") for i in range(200)]


def test_the_posterior_by_hand():
    part, memory = ThompsonSampling(keep=0.5, prior=1.0), {}
    part.learn(memory, drawn([(POOL[0], [1.0, 1.0, 0.0, 1.0])]))
    assert memory["beliefs"]["p0"] == [4.0, 2.0]  # 0.5 * 1 + 0.5 * 1 + 3 and + 1
    part.learn(memory, drawn([(POOL[0], [0.0, 0.0, math.nan, 0.0]), (Prompt("a hint"), ALL)]))
    assert memory["beliefs"] == {"p0": [2.5, 4.5]}  # of 3 samples; 0.5 * 4 + 0.5 + 0 and 0.5 * 2 + 0.5 + 3
    assert order.update_beta(3.0, 2.0, 0.25, 8, 1.0, 1.0) == (5.0, 8.0)  # without forgetting: Beta's own
    assert "rewards from 0 to 2" in message(part.learn, memory, drawn([(POOL[0], [0.0, 2.0])]))


def test_prompts_of_middling_rates_are_drawn():
    rates = np.linspace(0, 1, len(LARGE_POOL))
    part, memory = ThompsonSampling(candidates=8), {}
    rng, chosen = np.random.default_rng(0), []
    for epoch in range(120):
        batch = part(LARGE_POOL, 8, epoch, 0, None, memory, 8)
        assert len({prompt.key for prompt in batch}) == 8
        own = np.array([rates[int(prompt.text[1:])] for prompt in batch])
        chosen += own.tolist() if epoch >= 60 else []
        totals = torch.from_numpy((rng.random((8, 8)) < own[:, None]).astype(np.float64))
        found = EpochBatch(LARGE_POOL, epoch, 10, 0, Processes())
        found.add(batch, totals[..., None], totals)
        part.learn(memory, found)
    middling = np.mean([0.3 <= rate <= 0.7 for rate in chosen])
    assert middling > 0.6  # of prompts drawn evenly 0.4


def test_candidates_near_the_target():
    memory = {"beliefs": {prompt.key: [1e7 * i, 1e7 * (199 - i)] for i, prompt in enumerate(LARGE_POOL) if 0 < i < 199}}
    found = ThompsonSampling(target=0.25, candidates=1000)(LARGE_POOL, 3, 5, 0, None, memory, 8)
    assert {prompt.text for prompt in found} == {"p49", "p50", "p51"}
    for part in (ThompsonSampling(candidates=1), EpochPermutation()):
        assert sorted(p.text for p in part(LARGE_POOL, 7, 3, 1, None, {}, 8)) == sorted(
            p.text for p in sets.draw(LARGE_POOL, 7, 3, 1))
    assert EpochPermutation()(LARGE_POOL, 7, 3, 1, None, {}, 8) == sets.draw(LARGE_POOL, 7, 3, 1)
    assert len(ThompsonSampling()(LARGE_POOL[:3], 7, 0, 0, None, {}, 8)) == 7


RATES = (0.05, 0.2, 0.5, 0.95)


def test_budgets_of_groups_and_prompts():
    assert allocate(RATES, 32, 1, least=2) == [10, 13, 7, 2]
    worth = sum(value(own, rate) for own, rate in zip((10, 13, 7, 2), RATES))
    assert worth == pytest.approx(0.262, abs=5e-4) and sum(value(8, rate) for rate in RATES) == pytest.approx(0.247,
                                                                                                           abs=5e-4)
    assert value(2, 0.5) == pytest.approx(0.5 * 0.125, abs=1e-12) and value(1, 0.3) == pytest.approx(0, abs=1e-12)
    pool = [Prompt(text) for text in "abcdefgh"]
    memory = {"beliefs": {"a": [1.0, 19.0], "b": [4.0, 16.0], "c": [10.0, 10.0], "d": [19.0, 1.0]}}
    found = Knapsack(each=4)(pool[:4], 16, 0, 0, None, memory, 2)
    asked = list(dict.fromkeys(found))
    assert [found.count(prompt) for prompt in asked] == allocate([RATES["abcd".index(p.text)] for p in asked], 16, 2)
    assert sorted(p.text for p in asked) == list("abcd") and found.count(pool[1]) > found.count(pool[3]) == 1
    assert len(set(Knapsack(each=4)(pool, 16, 0, 0, None, {}, 2))) == 4
    assert Knapsack(each=9)(pool, 3, 0, 0, None, {}, 2) == [Knapsack(each=9)(pool, 3, 0, 0, None, {}, 2)[0]] * 3


@pytest.mark.parametrize("size", [1, 2])
def test_one_unit_after_the_other_finds_the_best_of_all(size):
    rates, units = (0.1, 0.4, 0.8), 9
    found = allocate(rates, units, size)
    best = max((own for own in itertools.product(range(1, units), repeat=3) if sum(own) == units),
               key=lambda own: math.fsum(value(n * size, rate) for n, rate in zip(own, rates)))
    assert sum(found) == units and found == list(best)


def test_groups_of_one_prompt_and_units_by_hand():
    rewards = torch.tensor([[1.0, 1.0], [0.0, 4.0], [0.0, 0.0]], dtype=torch.float64)[..., None]
    found = Pooled("none")(rewards, [2.0], Context(groups=PromptGroups(["x", "y", "x"])))
    assert found.tolist() == [[1, 1], [-4, 4], [-1, -1]]
    scaled = Pooled()(rewards, [1.0], Context(groups=PromptGroups(["x", "y", "x"])))
    assert scaled[0, 0].item() == pytest.approx(0.5 / (math.sqrt(1 / 3) + 1e-8), abs=1e-10)
    missing = torch.tensor([[1.0, math.nan], [0.0, 0.0]], dtype=torch.float64)[..., None]
    assert Pooled("none")(missing, [1.0], Context(groups=PromptGroups(["x", "x"]))).tolist() == [
        [pytest.approx(2 / 3), 0], [pytest.approx(-1 / 3)] * 2]
    # 1 / sqrt(p + .001 / p): 3.78, 1.98 and 1.05 of 6.82 in all, of 48: 26.6, 14.0 and 7.4.
    assert history.share_out((0.02, 0.25, 0.9), (1, 1, 1), 48, 1e-3, 2.0) == [27, 14, 7]
    assert history.share_out((0.5, 0.5), (1, 3), 8, 1e-3, 2.0) == [2, 6]
    assert history.share_out((0.5, 0.5, 0.5), (0, 1, 1), 9, 1e-3, 2.0) == [1, 4, 4]  # one without gradient: the least
    assert history.share_out((0.5, 0.5), (0, 0), 4, 1e-3, 2.0) == [2, 2]
    logp = torch.tensor([[0.5, 0.25, 0.9], [1.0, 1.0, 0.1]]).log()
    mask = torch.tensor([[True, True, False], [True, True, False]])
    assert history.gradient_norms(logp, mask).tolist() == pytest.approx([math.sqrt(0.25 + 0.5625), 0], abs=1e-6)


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
def test_norms_of_right_samples_decide_the_next_epochs_groups():
    pool = [Prompt("a"), Prompt("b"), Prompt("c"), Prompt("d")]
    part, memory = history.GradientVariance(each=4, keep=1.0), {}
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
