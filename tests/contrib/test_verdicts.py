"""Rewards made of verdicts: tables by hand, and the classes as a recipe names them."""

import math

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.advantages.group import group_relative
from flowgrpo.contrib import verdicts as verdicts
from flowgrpo.contrib.verdicts import progress
from flowgrpo.errors import UserError
from tests.helpers.refusals import message
from tests.helpers.tables import close, f64

NAN = math.nan


def same(found: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, f64(expected), rtol=0, atol=1e-12, equal_nan=True)


def values(reward, texts, metadata=None) -> list[float]:
    return rewards.score({"r": reward}, list(texts), ["p"] * len(texts), metadata or [{}] * len(texts))[:, 0].tolist()


def given(answers: dict):
    """A reward that scores a text by a table."""
    return lambda texts, prompts: [answers[text] for text in texts]


def test_votes_and_their_certainty():
    scores = f64([[0.95, 0.4, 0.4],  # 0.9 for, 0.2 + 0.2 against: a certain voter outvotes two
                  [0.9, 0.1, 0.1],  # all as certain: the plain majority
                  [1, 1, 0], [0.5, 0.5, 0.5], [0.8, 0.2, NAN], [NAN, NAN, 0.3], [NAN, NAN, NAN]])
    same(verdicts.votes(scores), [1, 0, 1, 0.5, 0.5, 0, NAN])
    voters = [given({"a": 0.95, "b": 0.1}), given({"a": 0.4, "b": None}), given({"a": 0.4, "b": 0.6})]
    assert values(rewards.find("votes", {"rewards": voters}), "ab") == [1, 0]
    with pytest.raises(UserError, match="a voter scores 2, expected from 0 to 1"):
        values(rewards.find("votes", {"rewards": [given({"a": 2})]}), "a")


def test_flaws_between_right_and_wrong():
    scores = f64([[1, 1], [1, 0.5], [1, 0.4], [0, 1], [0, 0], [1, NAN], [NAN, 1]])
    same(verdicts.flawed(scores, 1, 0.5), [1, 1, 0, -1, -1, 1, NAN])
    # With the deviation of all 8 (ddof 0) they are +1.73 and -0.71.
    early, late = f64([[0] * 2 + [-1] * 6]), f64([[1] * 5 + [0] * 2 + [-1]])
    for rewards_of, expected, flaw in ((early, 3**0.5, 0), (late, -(0.5**0.5), 5)):
        found = group_relative(rewards_of)[0, flaw].item() * (8 / 7) ** 0.5
        assert found == pytest.approx(expected, abs=1e-6)
    both = [given({"a": 1, "b": 1, "c": 0}), given({"a": 1, "b": 0, "c": 1})]
    assert values(rewards.find("flawed", {"rewards": both}), "abc") == [1, 0, -1]
    with pytest.raises(UserError, match="rewards is .*, expected two rewards"):
        rewards.find("flawed", {"rewards": both[:1]})


def test_a_recheck_asks_of_a_share_of_the_rejected():
    asked = []
    def judge(texts, prompts):
        asked.extend(texts)
        return [float(text in ("b", "d")) for text in texts]
    first = given({"a": 1, "b": 0, "c": 0, "d": None})
    found = values(rewards.find("rechecked", {"rewards": [first, judge], "share": 1.0}), "abcd")
    assert asked == ["b", "c"] and found[1:3] == [1, 0] and math.isnan(found[0]) and math.isnan(found[3])
    some = [verdicts.drawn(str(i), "p", 0.25) for i in range(2000)]
    assert sum(some) == pytest.approx(500, abs=80) and some == [verdicts.drawn(str(i), "p", 0.25) for i in range(2000)]


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


def test_failures_are_paid_by_their_nearness_to_a_success():
    """Distances 1 and 3 to the success: z is -1 and 1."""
    apart = f64([[0, 1, 3], [1, 0, 2], [3, 2, 0]])
    near, far = (0.8 / (1 + math.exp(z)) for z in (-1, 1))
    close(progress(torch.tensor([True, False, False]), apart, 0.8), [1, near, far], 1e-7)
    close(progress(torch.tensor([False] * 3), apart, 0.8), [0, 0, 0])
    close(progress(torch.tensor([True] * 3), apart, 0.8), [1, 1, 1])


def test_progress_of_texts_and_of_images():
    def right(outputs, prompts):
        return [float(text == "a b") if isinstance(text, str) else float(text.mean() == 1) for text in outputs]
    found = rewards.score({"r": rewards.find("progress", {"rewards": [right]})}, ["a b", "a c", "d e", "f", "g", "h"],
                          ["p"] * 6, [{}] * 6, 3)[:, 0].tolist()
    assert found[0] == 1 and 0 < found[2] < found[1] < 0.8 and found[3:] == [0, 0, 0]
    pictures = torch.stack([torch.full((3, 16, 16), value) for value in (1.0, 0.9, 0.1)])
    reward = rewards.find("progress", {"rewards": [right]})
    found = rewards.score({"r": reward}, pictures, ["p"] * 3, [{}] * 3, 3)[:, 0].tolist()
    assert found[0] == 1 and 0 < found[2] < found[1] < 0.8
