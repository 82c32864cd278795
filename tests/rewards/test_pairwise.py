"""Pairwise judges: who meets whom, win rates of true judges, and what is refused."""

import functools
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import flowgrpo
from flowgrpo import rewards
from flowgrpo.advantages import group_relative
from flowgrpo.advantages.shaping import WinRate, to_win_rates
from flowgrpo.rewards import find
from flowgrpo.rewards.pairwise import Pairing, held_out_rewards, pairing, require
from flowgrpo.run import align
from flowgrpo.training import sampling
from flowgrpo.types import Context, RewardColumns
from tests.helpers import loop, tiny
from tests.helpers.refusals import message, refused


def larger(first, second, prompts):
    """A judge of numbers: the larger one wins."""
    return [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(first, second)]


def judged(function, outputs, group: int, how: Pairing = Pairing()) -> list[float]:
    """The win rates of outputs in groups of the given size."""
    @functools.wraps(function)
    def judge(*arguments):
        return function(*arguments)
    judge.pairwise = how
    count = len(outputs)
    return rewards.score({"mine": judge}, outputs, ["a cat"] * count, [{}] * count, group)[:, 0].tolist()


# --- who meets whom --------------------------------------------------------------------------------------------------
def test_without_a_cap_every_pair_is_compared_once_and_with_one_all_equally_often():
    for group in (2, 3, 4, 5, 8, 9, 12):
        pairs = Pairing().pairs(group, "a cat")
        assert sorted(map(sorted, pairs)) == [[i, j] for i in range(group) for j in range(i + 1, group)]
        assert Pairing(comparisons=1000).pairs(group, "a cat") == pairs
    for group, comparisons in ((4, 2), (4, 4), (5, 5), (8, 4), (8, 12), (8, 20), (9, 18), (12, 18)):
        for prompt in "abc":
            pairs = Pairing(comparisons=comparisons).pairs(group, prompt)
            met, first = Counter(i for pair in pairs for i in pair), Counter(i for i, _ in pairs)
            assert len(pairs) == comparisons == len({frozenset(pair) for pair in pairs})
            assert set(met.values()) == {2 * comparisons // group} and len(met) == group
            assert max(first.values()) - min(first[i] for i in range(group)) <= 1


def test_pairs_by_seed_and_win_rates_by_hand():
    draw = {(prompt, seed): tuple(Pairing(comparisons=12, seed=seed).pairs(8, prompt)) for prompt in "ab"
            for seed in (0, 1)}
    assert len(set(draw.values())) == 4 and tuple(Pairing(comparisons=12).pairs(8, "a")) == draw["a", 0]
    # 5 beats all; the two 3s tie and beat 1: (1/2 + 1) / 3 each.
    assert judged(larger, [3, 5, 3, 1], 4) == pytest.approx([0.5, 1, 0.5, 0])
    assert judged(larger, [3, 5, 3, 1], 2) == [0, 1, 1, 0]  # two groups: 3 against 5, 3 against 1
    assert judged(larger, torch.tensor([3.0, 5, 3, 1]), 4, Pairing(both_orders=True)) == pytest.approx([0.5, 1, 0.5, 0])
    [(a, b), (c, d)] = Pairing(comparisons=2).pairs(4, "a cat")
    expected = [0.0] * 4
    for first, second in ((a, b), (c, d)):
        expected[max(first, second)] = 1.0
    assert judged(larger, [0, 1, 2, 3], 4, Pairing(comparisons=2)) == expected


@pytest.mark.parametrize("group, comparisons, told", [
    (8, 10, "comparisons is 10, but every sample of a group of 8 is compared equally often: expected 8 or 12"),
    (8, 3, "expected 4"), (5, 7, "expected 5 or 10"), (5, 4, "expected 5"), (12, 65, "expected 60 or 66")])
def test_a_cap_that_is_not_regular_is_refused_with_the_nearest(group, comparisons, told):
    refused(f"{told}$", Pairing(comparisons=comparisons).pairs, group, error=ValueError)
    judge = SimpleNamespace(pairwise=Pairing(comparisons=comparisons))
    refused("^judge 'mine': comparisons is", require, {"mine": judge}, group)
    assert "comparisons is 0, expected 1 or more" in message(Pairing, comparisons=0, error=ValueError)


# --- win rates -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("group", [2, 5, 8])
def test_win_rates_of_all_pairs_sum_to_half_the_group(group):
    noise = torch.Generator().manual_seed(0)
    def whim(first, second, prompts):
        return torch.randint(0, 3, (len(prompts),), generator=noise) / 2
    for how in (Pairing(), Pairing(both_orders=True)):
        rates = judged(whim, torch.zeros(3 * group), group, how)
        assert [sum(rates[at:at + group]) for at in range(0, 3 * group, group)] == pytest.approx([group / 2] * 3)


def test_positions_do_not_count():
    """A judge that adds a bonus to the first: in one order it is wrong, in both it is as good as an unbiased one."""
    strengths = torch.tensor([0.0, 1, 2, 3, 4, 5])
    def biased(first, second, prompts):
        return (first + 10 > second).double()
    def unfair(first, second, prompts):  # sees the truth, and leans to the first by a quarter
        return ((first > second).double() + 0.25).clamp(0, 1)
    assert judged(biased, strengths, 6, Pairing(both_orders=True)) == [0.5] * 6
    assert judged(biased, strengths, 6) != [0.5] * 6
    # A win counts (1 + 3/4) / 2 instead of 1, a defeat (0 + 1/4) / 2: the same line for all, steps of 3/4 of 1/5.
    expected = [0.125 + 0.75 * wins / 5 for wins in range(6)]
    assert judged(unfair, strengths, 6, Pairing(both_orders=True)) == pytest.approx(expected)
    assert judged(unfair, strengths, 6) != pytest.approx(expected, abs=1e-3)
    # In an odd group everybody is first as often as second, so that a judge who only sees positions is fair.
    assert judged(lambda first, second, prompts: [1] * len(prompts), [0] * 7, 7) == pytest.approx([0.5] * 7)


def test_pairs_without_an_answer_do_not_count():
    def shy(first, second, prompts):
        return [None if 9 in (a, b) else float(a > b) for a, b in zip(first, second)]
    rates = judged(shy, [1, 9, 2, 3], 4)
    assert math.isnan(rates[1]) and [rates[0], rates[2], rates[3]] == [0, 0.5, 1]
    def shy_first(first, second, prompts):  # no answer where the larger number comes first
        return [None if a > b else 0.0 for a, b in zip(first, second)]
    assert judged(shy_first, [1, 2], 2, Pairing(both_orders=True)) == [0, 1]


def test_judges_see_pairs_and_take_their_arguments():
    seen = []
    def judge(first, second, prompts, metadata):
        seen.append((first.shape, second.shape, prompts, metadata))
        return (first.mean((1, 2, 3)) > second.mean((1, 2, 3))).float()
    judge.pairwise = True
    pictures = torch.arange(4.0)[:, None, None, None].expand(4, 3, 2, 2)
    found = rewards.score({"mine": judge}, pictures, ["a", "a", "b", "b"], [{"n": 1}] * 2 + [{"n": 2}] * 2, 2)
    assert found[:, 0].tolist() == [0, 1, 0, 1]
    assert seen == [((1, 3, 2, 2), (1, 3, 2, 2), [name], [{"n": n}]) for name, n in (("a", 1), ("b", 2))]
    refused(r"judge 'mine' takes .*: expected \(first, second, prompts, metadata\)", rewards.score,
            {"mine": marked(lambda images: [1])}, [1, 2], ["a", "a"], [{}, {}], 2)


def test_judges_are_called_in_parts_and_by_name():
    calls = []
    def judge(first, second, prompts):
        calls.append(len(prompts))
        return larger(first, second, prompts)
    assert judged(judge, list(range(16)), 16) == pytest.approx([wins / 15 for wins in range(16)])
    assert calls == [64, 56]
    @flowgrpo.judge("test_better", both_orders=True, comparisons=4)
    class Better:
        def __call__(self, first, second, prompts):
            return larger(first, second, prompts)

    found = find("test_better")
    assert pairing(found) == Pairing(True, 4) and pairing(larger) == Pairing()  # by its names
    assert rewards.score({"better": found}, [3, 1], ["a", "a"], [{}, {}], 2)[:, 0].tolist() == [1, 0]
    def place(outputs, prompts, metadata, group):
        return [index % group for index in range(len(prompts))]
    place.group = True
    found = rewards.score({"place": place}, torch.zeros(6), ["a"] * 6, [{}] * 6, 3)
    assert found[:, 0].tolist() == [0, 1, 2, 0, 1, 2]


# --- finding and refusing --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("answer, told", [
    ([2.0], "judge 'mine' returned 2.0, expected 1 (the first is better), 0"), ([math.nan], "returned nan, expected 1"),
    ([0.0, 1.0], "judge 'mine' returned 2 values, expected 1, one per pair (prompt: 'a cat')"),
    (1.0, "judge 'mine' returned 1.0, expected 1, one per pair"), (["first"], "returned 'first', expected 1"),
    ([{}], "returned {}, expected 1")])
def test_an_answer_that_is_none_is_told(answer, told):
    assert told in message(judged, lambda first, second, prompts: answer, [1, 2], 2)


def marked(function):
    function.pairwise = True
    return function


def test_lone_images_and_held_out_evaluations():
    refused("reward 'mine' compares the samples of a group, but here every image is", judged, larger, [1, 2], 1)
    judge = marked(lambda first, second, prompts: [0.5] * len(prompts))
    assert held_out_rewards({"judge": judge, "red": tiny.red}, {"green": len}) == {"red": tiny.red, "green": len}
    assert held_out_rewards({"judge": judge}, {"red": tiny.red}) == {"red": tiny.red}
    for trained, further in (({"judge": judge}, {}), ({"red": tiny.red}, {"judge": judge})):
        refused("reward 'judge' compares the samples of a group, and a held-out ", held_out_rewards, trained, further)


# --- pref_grpo with a true judge -------------------------------------------------------------------------------------
@marked
def redder(first, second, prompts):
    return (tiny.red(first, prompts) > tiny.red(second, prompts)).float()


def test_previews_are_one_group_and_win_rates_not_lifted():
    rates = torch.tensor([[[0.5, 3], [0.6, 1], [0.4, 2]]])
    shaped = WinRate()(rates, Context(rewards=RewardColumns(win_rates=[True, False])))
    torch.testing.assert_close(shaped[..., 0], rates[..., 0])
    torch.testing.assert_close(shaped[..., 1], to_win_rates(rates)[..., 1])
    assert torch.equal(WinRate()(rates, Context()), to_win_rates(rates)) and torch.equal(
        WinRate()(rates), to_win_rates(rates))
    sizes = []
    def watched(outputs, prompts, metadata, group):
        sizes.append((len(prompts), group))
        return tiny.red(outputs, prompts)
    watched.group = True
    trainer = tiny.trainer(method="mix_grpo+sol_rl", parts__preview={"pool": 9, "steps": 2}, rewards={"red": watched})
    sampling.sample(trainer, trainer.prompts[:2])
    assert sizes == [(18, 9), (4, 4), (4, 4)]


def test_a_judge_by_scores_trains_as_the_scores_that_are_lifted():
    """Pref-GRPO with a judge that compares a score is Pref-GRPO with the score, lifted once."""
    found = []
    for given in ({"red": redder}, {"red": tiny.red}):
        trainer = tiny.trainer(method="pref_grpo", rewards=given)
        tiny.stir(trainer.policy)
        parts, conditioning, grouped = sampling.sample(trainer, trainer.prompts[:2])
        found.append([part.advantages for part in loop.credit(trainer, parts, grouped, conditioning.prompts)])
        if given["red"] is redder:
            torch.testing.assert_close(grouped.sum(1), torch.full((2, 1), 2.0))
            torch.testing.assert_close(found[0][0][0], group_relative(grouped[..., 0])[0])
    for one, other in zip(*found):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # win rates in float32 and in float64


def test_a_run_with_a_judge_measures_another_reward(tmp_path):
    settings = dict(prompts=tiny.PROMPTS, method="pref_grpo", output=str(tmp_path), tracker="none", device="cpu",
                    held_out=0.3, image={"call": tiny.CALL}, adapter={"rank": 2}, seed=1,
                    train={"epochs": 1, "prompts": 2, "group": 4, "micro_batch": 4, "steps": 4})
    refused("reward 'redder' compares the samples of a group, and a held-out evaluation", align, tiny.sd3(), redder,
            **settings)
    flowgrpo.reward("test_red")(tiny.red)
    summary = align(tiny.sd3(), redder, **settings, eval={"steps": 2, "prompts": 2, "grid": 1, "rewards": ["test_red"]})
    assert summary["before"].keys() == {"test_red"} and summary["rewards"]["measured"] == ["test_red"]
    assert summary["max_first_log_ratio"] <= 1e-6 and summary["updates"] == 1


def test_a_cap_that_does_not_fit_the_run_is_told_before_it(tmp_path):
    judge = marked(lambda first, second, prompts: [0.5] * len(prompts))
    judge.pairwise, judge.__name__ = Pairing(comparisons=5), "mine"
    refused("judge 'mine': comparisons is 5, but .* group of 4 .*: expected 4 or 6",
            align, "starter", judge, method="pref_grpo", output=str(tmp_path), train={"group": 4})
