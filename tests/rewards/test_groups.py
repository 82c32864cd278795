"""Rewards that compare the samples of a group: tables by hand."""

from __future__ import annotations

import math

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.advantages.group import group_relative
from flowgrpo.errors import UserError
from flowgrpo.rewards import groups
from flowgrpo.text.rewards import majority
from tests.helpers.tables import close, f64

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


def test_failures_are_paid_by_their_nearness_to_a_success():
    """Distances 1 and 3 to the success: z is -1 and 1."""
    apart = f64([[0, 1, 3], [1, 0, 2], [3, 2, 0]])
    near, far = (0.8 / (1 + math.exp(z)) for z in (-1, 1))
    close(groups.progress(torch.tensor([True, False, False]), apart, 0.8), [1, near, far], 1e-7)
    close(groups.progress(torch.tensor([False] * 3), apart, 0.8), [0, 0, 0])
    close(groups.progress(torch.tensor([True] * 3), apart, 0.8), [1, 1, 1])


def test_progress_of_texts_and_of_pictures():
    def right(outputs, prompts):
        return [float(text == "a b") if isinstance(text, str) else float(text.mean() == 1) for text in outputs]

    found = scored("progress", {"rewards": [right]}, ["a b", "a c", "d e", "f", "g", "h"], 3)
    assert found[0] == 1 and 0 < found[2] < found[1] < 0.8 and found[3:] == [0, 0, 0]
    pictures = torch.stack([torch.full((3, 16, 16), value) for value in (1.0, 0.9, 0.1)])
    reward = rewards.find("progress", {"rewards": [right]})
    found = rewards.score({"r": reward}, pictures, ["p"] * 3, [{}] * 3, 3)[:, 0].tolist()
    assert found[0] == 1 and 0 < found[2] < found[1] < 0.8
