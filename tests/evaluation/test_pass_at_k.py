"""pass@k and maj@n: tables by hand, and pass@k by counting every choice of k samples."""

import itertools
import math

import numpy as np
import pytest

from flowgrpo import rewards
from flowgrpo.evaluation.findings import majority, pass_at_k, powers, tries, verdicts

NAN = math.nan


@pytest.mark.parametrize("samples, right, k, expected", [
    (4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 1, 3, 0.75), (4, 1, 4, 1.0),  # one right one is among k of 4 with k / 4
    (5, 2, 2, 0.7),  # 1 - C(3,2) / C(5,2) = 1 - 3/10
    (10, 3, 5, 11 / 12),  # 1 - C(7,5) / C(10,5) = 1 - 21/252
    (4, 0, 4, 0.0), (4, 4, 1, 1.0), (200, 1, 100, 0.5)])
def test_pass_at_k_by_hand(samples, right, k, expected):
    assert pass_at_k(samples, right, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_mean_over_all_choices():
    for samples, right in itertools.product((1, 3, 6), range(7)):
        given = [i < right for i in range(samples)]
        for k in range(1, samples + 1):
            choices = [any(chosen) for chosen in itertools.combinations(given, k)]
            assert pass_at_k(samples, sum(given), k) == pytest.approx(np.mean(choices), abs=1e-12)


@pytest.mark.parametrize("given", [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_what_cannot_be_asked_is_told(given):
    with pytest.raises(ValueError, match="expected k from 1 and right from 0"):
        pass_at_k(*given)


@pytest.mark.parametrize("answers, scores, expected", [
    (["7", "7", "3"], [1, 1, 0], 1.0), (["7", "3", "3"], [1, 0, 0], 0.0),
    (["7", "3"], [1, 0], 0.5),  # as often
    (["7", None, None, "3", "7"], [1, 0, 0, 0, 1], 1.0), ([None, None], [0, 0], 0.0), (["7", "7"], [1, NAN], NAN)])
def test_the_majority_by_hand(answers, scores, expected):
    assert majority(answers, scores) == pytest.approx(expected, nan_ok=True)


def test_what_is_told_of_several_rewards():
    """Of a table [3,4] with a prompt that the reward does not apply to; of a score between 0 and 1 nothing is told."""
    right = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [NAN, NAN, NAN, NAN]])
    answers = [["a", "b", "b", "c"], ["a", "a", "b", "c"], ["a"] * 4]
    found = tries({"right": right, "graded": np.where(np.isnan(right), 0.5, right)}, {"right": answers})
    assert list(found) == ["right"] and list(found["right"]) == ["pass@1", "pass@2", "pass@4", "maj@4"]
    means = {what: told["mean"] for what, told in found["right"].items()}
    assert means == pytest.approx({"pass@1": (1 / 4 + 2 / 4) / 2, "pass@2": (1 / 2 + 5 / 6) / 2, "pass@4": 1.0,
                                   "maj@4": 0.5})  # b leads in the first row, a in the second
    assert all(told["prompts"] == 2 for told in found["right"].values())
    assert tries({"right": right[:, :1]}, {}) == {} and powers(6) == [1, 2, 4, 6] and powers(8) == [1, 2, 4, 8]


def test_penalties_are_no_verdicts():
    """repetition and overlong are 0 at best, sharpness has no bound; of a plain function nothing is known."""
    given = {name: rewards.find(name) for name in ("repetition", "numeric_match", "exact_match", "sharpness")}
    given["overlong"] = rewards.find("overlong", {"longest": 8, "buffer": 4})
    assert verdicts(given | {"own": len}) == ["numeric_match", "exact_match", "own"]
