"""Several tasks in one run (Q-Insight): each prompt has the rewards of its task, and one that is saturated leaves the
other's gradient."""

import math

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.advantages.group import combine
from flowgrpo.config import validate

RECIPE = {"reward": {
    "score": {"use": "numeric_match", "args": {"tolerance": 0.1}, "when": {"task": "score"}},
    "damage": {"use": "exact_match", "when": {"task": "damage"}},
    "format_tags": {"args": {"tags": ["answer"]}, "weight": 0.1}}}


def scores(composed, task: str, answer: str, texts: list[str]) -> torch.Tensor:
    metadata = [{"task": task, "answer": answer}] * len(texts)
    return rewards.score(composed, texts, ["p"] * len(texts), metadata)[None]


@pytest.fixture
def composed():
    return rewards.compose(validate(RECIPE).trained)


def test_a_score_within_the_tolerance_is_right(composed):
    """Of a mean opinion of 4, 0.1 of it is 0.4 either way."""
    found = scores(composed, "score", "4", [f"<answer>{x}</answer>" for x in (4, 4.4, 4.5, 3.6, 3.5)])[0]
    assert found[:, 0].tolist() == [1, 1, 0, 1, 0] and found[:, 1].isnan().all() and (found[:, 2] == 1).all()


def test_a_saturated_task_leaves_the_gradient_of_the_other(composed):
    weights = list(validate(RECIPE).rewards.values())
    done = combine(scores(composed, "score", "4", ["<answer>4</answer>"] * 4), weights)
    going = combine(scores(composed, "damage", "blur", ["<answer>blur</answer>", *["<answer>noise</answer>"] * 3]),
                    weights)
    assert (done == 0).all() and going[0, 0] == pytest.approx(0.75 / 0.5, abs=1e-6) and math.isclose(
        going.sum().item(), 0, abs_tol=1e-6)
