"""Rewards that compare the samples of a group: tables by hand."""

import math

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.advantages.group import group_relative
from flowgrpo.errors import UserError
from flowgrpo.text.rewards import majority

A, B, C = "answer: a", "answer: b", "answer: c"


def scored(name, args, texts, group) -> list[float]:
    return rewards.score({"r": rewards.find(name, args)}, texts, ["p"] * len(texts), [{}] * len(texts),
                         group)[:, 0].tolist()


@pytest.mark.parametrize("answers, agree, share", [
    ("aabac", [1, 1, 0, 1, 0], [0.6, 0.6, 0.2, 0.6, 0.2]), ("ba", [1, 0], [0.5, 0.5]), ("aa", [1, 1], [1, 1]),
    ([None, None, "a"], [0, 0, 1], [0, 0, 1 / 3]), ([None, None], [0, 0], [0, 0])])
def test_the_majority_of_a_group(answers, agree, share):
    assert majority.agreement(list(answers)) == agree and majority.frequencies(list(answers)) == pytest.approx(share)


def test_the_certainty_of_a_group():
    half = math.log(2)
    assert [majority.certainty(answers) for answers in ("aaaa", "abcd", "aabb", "a")] == pytest.approx(
        [1, 0, 1 - half / math.log(4), 1])


def test_a_majority_in_a_recipe_reads_no_label():
    assert scored("majority", {}, [A, A, B, A, C, B, B, B, A, C], 5) == [1, 1, 0, 1, 0, 1, 1, 1, 0, 0]
    assert scored("majority", {"score": "share", "certainty": 0.5}, [A, A, A, A], 4) == [1.5] * 4
    assert scored("majority", {"kind": "number"}, ["it is 2", "2.0", "3", "two"], 4) == [1, 1, 0, 0]
    assert (group_relative(torch.tensor([scored("majority", {}, [A, A], 2)])) == 0).all()
    with pytest.raises(UserError, match="score is 'mean'"):
        rewards.find("majority", {"score": "mean"})
