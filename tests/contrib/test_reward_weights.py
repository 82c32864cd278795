"""Rewards made of verdicts, and weights that adapt: tables by hand, and the classes as a recipe names them."""

import math

import pytest
import torch

from flowgrpo import methods, rewards
from flowgrpo.advantages.group import Advantage, group_relative
from flowgrpo.contrib import reward_weights
from flowgrpo.contrib import verdicts as verdicts
from flowgrpo.contrib.verdicts import progress
from flowgrpo.errors import UserError
from flowgrpo.methods import overlay
from flowgrpo.types import Context, RunState
from tests.helpers import tiny_text
from tests.helpers.refusals import message, refused
from tests.helpers.tables import close, f64

ONE, OTHER, NONE = [1, 1, -1, -1], [1, -1, 1, -1], [0, 0, 0, 0]  # advantages of a group of four: orthogonal, and silent


def columns(*each: list[int]) -> torch.Tensor:
    """Advantages or rewards [1, 4, R]."""
    return f64(each).T[None]


@pytest.mark.parametrize("each, weights, influence", [
    ((ONE, OTHER), [1, 1], [0.5, 0.5]),  # they leave each other alone
    ((ONE, NONE), [1, 1], [0.5, 0]),  # the second is saturated
    ((ONE, ONE, [-a for a in ONE]), [1, 1, 1], [1 / 3, 1 / 3, -1 / 3]),  # the third pulls against the others
    ((ONE, OTHER), [3, 1], [0.75, 0.25]), ((ONE, OTHER), [1, 0], [1, 0])])
def test_weights_move_by_their_influence(each, weights, influence):
    moved = [w * math.exp(2 * i) for w, i in zip(weights, influence)]
    expected = [sum(weights) * each / sum(moved) for each in moved]
    close(reward_weights.mirror_descent(columns(*each), f64(weights), 2), expected)


def test_the_sum_is_under_adapted_weights_which_keep_their_sum():
    advantages = torch.cat([columns(ONE, OTHER), columns(ONE, NONE), columns(ONE, NONE), columns(ONE, NONE)])
    moved = [math.exp(0.5), math.exp(0.5 / 4)]
    close(reward_weights.mirror_descent(advantages, f64([1, 1]), 1), [2 * each / sum(moved) for each in moved])
    # (0, 0, 1, 1) has the deviation sqrt(1/3): advantages of +-sqrt(3)/2, whose square is 3/4, 3/8 under a half.
    share = math.exp(0.375) / (math.exp(0.375) + 1)
    expected = 2 * share * math.sqrt(0.75)
    found = reward_weights.Influence()(columns([0, 0, 1, 1], [5, 5, 5, 5]), [1, 1])
    assert found[0].tolist() == pytest.approx([-expected, -expected, expected, expected], abs=1e-7)
    weights = reward_weights.mirror_descent(columns(ONE, NONE) * 100, f64([1, 3]), 50)
    close(weights, [4, 0])
    assert (reward_weights.Influence()(columns(NONE, NONE), [1, 1]) == 0).all()
    method = overlay.with_parts(methods.preset("flow_grpo"), {"advantage": {"type": "Influence", "rate": 2}})
    assert method.credit.advantage == reward_weights.Influence(2)


def test_without_a_rate_it_is_the_weighted_sum_of_advantages():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(5, 6, 3, generator=generator, dtype=torch.float64)
    rewards[0, :2, 1] = torch.nan
    weights = [1.0, 0.5, 2.0]
    close(reward_weights.Influence(rate=0)(rewards, weights), Advantage()(rewards, weights).tolist())
    assert not torch.allclose(reward_weights.Influence(rate=3)(rewards, weights), Advantage()(rewards, weights))
    scaled = rewards * f64([10, 1, 100]) + 7  # the scale of a reward is of no consequence
    one, other = (reward_weights.Influence()(each, weights) for each in (scaled, rewards))
    assert torch.allclose(one, other, atol=1e-6)
    assert reward_weights.Influence(clamp=0.5)(rewards, weights).abs().max() == 0.5


@pytest.mark.parametrize("weights, told", [
    ([1, -1], "expected 0 or more, and one above"), ([0, 0], "expected 0 or more, and one above"),
    ([1], "one weight per reward")])
def test_what_cannot_be(weights, told):
    refused(told, reward_weights.Influence(), columns(ONE, OTHER), weights, error=ValueError)


# --- over a run ------------------------------------------------------------------------------------------------------
def test_influence_adds_up_from_epoch_to_epoch_and_not_within_one():
    """The first reward's influence is 1/2 of a weight share v per unit: w_1 after k epochs, by the rule itself."""
    rewards, memory = columns([0, 0, 1, 1], [5, 5, 5, 5]), {}
    advantages = torch.stack([group_relative(each) for each in rewards.unbind(2)], 2)
    weights = f64([1, 1])
    for epoch in range(3):
        weights = reward_weights.mirror_descent(advantages, weights, 1.0)
        for _ in range(2):  # a second call of the epoch, as for inner nodes, or after a resume
            reward_weights.Influence()(rewards, [1, 1], Context(RunState(epoch, memory=memory)))
        close(f64(memory["influence"]["after"]), weights.tolist())
    assert weights[0] > 1.5 and weights.sum() == pytest.approx(2)


@pytest.mark.parametrize("points, volume", [
    ([], 0), ([[2, 3]], 6), ([[2, 3], [1, 1]], 6), ([[2, 3], [3, 2]], 8), ([[2, 3], [-1, 5]], 6),
    ([[1, 1, 1]], 1), ([[1, 1, 2], [2, 1, 1]], 3), ([[4], [2]], 4)])
def test_the_volume_below_a_front(points, volume):
    assert reward_weights.hypervolume(points) == pytest.approx(volume)


def test_a_front_and_its_growth():
    assert reward_weights.front([[1, 1], [2, 0], [1, 1], [2, 2], [0, 3]]) == [[2, 2], [0, 3]]
    # Means (1, 2), then (2, 1), which adds 1 to a volume of 2, then (1, 1), which adds none; the factors are outputs
    # of the released compute_score of dynamic-reward-weighting.
    def rewards(first, second):
        return columns([0, 2 * first], [0, 2 * second])
    memory, plain = {}, [-(2**0.5), 2**0.5]
    for epoch, (means, factor) in enumerate([((1, 2), 1), ((2, 1), 1.6423912339), ((1, 1), 0.5)]):
        for _ in range(2):
            found = reward_weights.Hypervolume()(rewards(*means), [1, 1], Context(RunState(epoch, memory=memory)))
            close(found[0], [value * factor for value in plain], 1e-7)


def test_a_hard_prompt_with_a_gap_has_longer_advantages():
    """Means 1/4 and 3/4, gaps 3/4 and 1/4: z is 1 and -1 of both, so the product is sigmoid(1)^2 and sigmoid(-1)^2."""
    rewards = f64([[0, 0, 0, 1], [1, 1, 1, 0]])
    hard, easy = (1 / (1 + math.exp(-z)) for z in (1, -1))
    expected = [2 * each**2 / (hard**2 + easy**2) for each in (hard, easy)]
    close(reward_weights.difficulty(rewards), expected, 1e-6)
    found, plain = reward_weights.HardPrompts()(rewards[..., None], [1]), group_relative(rewards)
    torch.testing.assert_close(found, plain * f64(expected)[:, None], rtol=1e-6, atol=0)
    assert torch.equal(reward_weights.HardPrompts(strength=0)(rewards[..., None], [1]), plain)
    close(reward_weights.difficulty(f64([[1, 1], [1, 1], [math.nan] * 2])), [1, 1, 1])


def test_misses_and_forward_correction():
    """A verifier accepts 1 of 10 wrong samples and rejects 3 of 10 right ones."""
    right, wrong = columns([1] * 7 + [0] * 3), columns([1] + [0] * 9)
    correct = reward_weights.ForwardCorrected(misses=0.3)
    assert correct(right, [1]).mean().item() == pytest.approx(0)
    assert correct(wrong, [1]).mean().item() == pytest.approx(-0.6)
    assert correct(columns([math.nan, 1, 0]), [1])[0].tolist() == pytest.approx([0, 0.3, -0.7])
    # 6 accepted, 4 rejected, of which 2 are rechecked and 1 is right: 4 / 2 = 2 of 8 right ones are missed. Then with
    # 10 rejected, 6 rechecked and 1 right: 10 / 6 of 10 / 6 + 6.
    nan, memory = math.nan, {}
    first = columns([1] * 6 + [0] * 4, [nan] * 6 + [1, 0, nan, nan])
    later = columns([0] * 6, [0] * 4 + [nan] * 2)
    for epoch, (batch, rate) in enumerate([(first, 0.25), (later, 10 / 6 / (10 / 6 + 6))]):
        for _ in range(2):
            found = reward_weights.ForwardCorrected()(batch, [1, 1], Context(RunState(epoch, memory=memory)))
            close(found, (batch[..., 0] - 1 + rate).tolist())


@pytest.mark.parametrize("part, rewards, message", [
    ("ForwardCorrected", {"short": 1.0}, "1 rewards, expected one verdict with misses set"),
    ("Hypervolume", {"short": -1.0}, "expected at most 4 of 0 or more"),
    ("Influence", {"short": -1.0}, "expected 0 or more, and one above")])
def test_rewards_that_a_part_cannot_read_are_refused_before_a_run(part, rewards, message):
    refused(message, tiny_text.trainer, reward=rewards, parts__advantage__type=part)


NAN = math.nan


def values(reward, texts, metadata=None) -> list[float]:
    return rewards.score({"r": reward}, list(texts), ["p"] * len(texts), metadata or [{}] * len(texts))[:, 0].tolist()


def given(answers: dict):
    """A reward that scores a text by a table."""
    return lambda texts, prompts: [answers[text] for text in texts]


def test_votes_and_their_certainty():
    scores = f64([[0.95, 0.4, 0.4],  # 0.9 for, 0.2 + 0.2 against: a certain voter outvotes two
                  [0.9, 0.1, 0.1],  # all as certain: the plain majority
                  [1, 1, 0], [0.5, 0.5, 0.5], [0.8, 0.2, NAN], [NAN, NAN, 0.3], [NAN, NAN, NAN]])
    close(verdicts.Votes([given({})] * 3).combine(scores), [1, 0, 1, 0.5, 0.5, 0, NAN], 1e-12)
    voters = [given({"a": 0.95, "b": 0.1}), given({"a": 0.4, "b": None}), given({"a": 0.4, "b": 0.6})]
    assert values(rewards.find("votes", {"rewards": voters}), "ab") == [1, 0]
    with pytest.raises(UserError, match="a voter scores 2, expected from 0 to 1"):
        values(rewards.find("votes", {"rewards": [given({"a": 2})]}), "a")


def test_flaws_between_right_and_wrong():
    scores = f64([[1, 1], [1, 0.5], [1, 0.4], [0, 1], [0, 0], [1, NAN], [NAN, 1]])
    close(verdicts.Flawed([given({})] * 2).combine(scores), [1, 1, 0, -1, -1, 1, NAN], 1e-12)
    # With the deviation of all 8 (ddof 0) they are +1.73 and -0.71.
    early, late = f64([[0] * 2 + [-1] * 6]), f64([[1] * 5 + [0] * 2 + [-1]])
    for rewards_of, expected, flaw in ((early, 3**0.5, 0), (late, -(0.5**0.5), 5)):
        found = group_relative(rewards_of)[0, flaw].item() * (8 / 7) ** 0.5
        assert found == pytest.approx(expected, abs=1e-6)
    both = [given({"a": 1, "b": 1, "c": 0}), given({"a": 1, "b": 0, "c": 1})]
    assert values(rewards.find("flawed", {"rewards": both}), "abc") == [1, 0, -1]
    refused("rewards is .*, expected two rewards", rewards.find, "flawed", {"rewards": both[:1]})


def test_a_recheck_asks_of_a_share_of_the_rejected():
    asked = []
    def judge(texts, prompts):
        asked.extend(texts)
        return [float(text in ("b", "d")) for text in texts]
    first = given({"a": 1, "b": 0, "c": 0, "d": None})
    found = values(rewards.find("rechecked", {"rewards": [first, judge], "share": 1.0}), "abcd")
    assert asked == ["b", "c"] and found[1:3] == [1, 0] and math.isnan(found[0]) and math.isnan(found[3])
    some = [verdicts.is_sampled(str(i), "p", 0.25) for i in range(2000)]
    assert sum(some) == pytest.approx(500, abs=80) and some == [
        verdicts.is_sampled(str(i), "p", 0.25) for i in range(2000)]


def test_difficulties_and_rewritten_prompts():
    reward = rewards.find("scaled", {"rewards": [given({"a": 0.5, "b": None})]})
    found = values(reward, "aaab", [{"difficulty": 2}, {"difficulty": 0.5}, {}, {}])
    assert found[:3] == [1, 0.25, 0.5] and math.isnan(found[3])
    assert "metadata.difficulty is 'hard', expected a number" in message(values, reward, "a", [{"difficulty": "hard"}])
    reward = rewards.find("user_prompt", {"rewards": [lambda texts, prompts: [float(prompt == "a cat")
                                                                              for prompt in prompts]]})
    scores = rewards.score({"r": reward}, ["x", "x", "x"], ["a fluffy cat", "a cat", "a cat"],
                           [{"user_prompt": "a cat"}, {}, {"user_prompt": "a dog"}])
    assert scores[:, 0].tolist() == [1, 1, 0]


def test_nearness_and_progress_by_hand():
    """Distances 1 and 3 to the success: z is -1 and 1."""
    apart = f64([[0, 1, 3], [1, 0, 2], [3, 2, 0]])
    near, far = (0.8 / (1 + math.exp(z)) for z in (-1, 1))
    close(progress(torch.tensor([True, False, False]), apart, 0.8), [1, near, far], 1e-7)
    close(progress(torch.tensor([False] * 3), apart, 0.8), [0, 0, 0])
    close(progress(torch.tensor([True] * 3), apart, 0.8), [1, 1, 1])
    def right(outputs, prompts):
        return [float(text == "a b") if isinstance(text, str) else float(text.mean() == 1) for text in outputs]
    found = rewards.score({"r": rewards.find("progress", {"rewards": [right]})}, ["a b", "a c", "d e", "f", "g", "h"],
                          ["p"] * 6, [{}] * 6, 3)[:, 0].tolist()
    assert found[0] == 1 and 0 < found[2] < found[1] < 0.8 and found[3:] == [0, 0, 0]
    pictures = torch.stack([torch.full((3, 16, 16), value) for value in (1.0, 0.9, 0.1)])
    reward = rewards.find("progress", {"rewards": [right]})
    found = rewards.score({"r": reward}, pictures, ["p"] * 3, [{}] * 3, 3)[:, 0].tolist()
    assert found[0] == 1 and 0 < found[2] < found[1] < 0.8
