"""Advantages of right and wrong samples, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from flowgrpo.advantages.baselines import Correctness, Decoupled
from flowgrpo.types import Context, SampleMeasures
from tests.helpers.tables import close, f64

NAN = math.nan
RIGHT, SHORT = [1, 1, 1, 1, 1, 0, 0, 0], [1, 0.95, 0.9, 0.85, 0.25, 0.1, 0.2, 0.3]


def test_a_long_but_right_sample_is_still_pulled_up_by_hand():
    rewards = f64([[[right, short] for right, short in zip(RIGHT, SHORT)]])
    found = Decoupled(temperature=0.5)(rewards, [1.0, 1.0])[0]
    weights = [math.exp(short / 0.5) for short in SHORT[:5]]
    close(found, [3 / 8 * 5 * weight / sum(weights) for weight in weights] + [-5 / 8] * 3)
    assert weights[4] / sum(weights) == pytest.approx(0.0605, abs=5e-5) and found[4] > 0
    # Of the other samples' lengths, and of the wrong ones' own, the wrong ones know nothing.
    rewards[0, :, 1] = f64([0.3, 0.1, 0.9, 0.9, 0.9, 1, 1, 0])
    assert torch.equal(Decoupled()(rewards, [1.0, 1.0])[0, 5:], found[5:])
    close(Decoupled(temperature=1e12)(rewards, [1.0, 1.0]), Correctness()(rewards[..., :1], [1.0]).tolist())


def test_of_one_reward_the_lengths_are_the_auxiliary():
    context = Context(samples=SampleMeasures(lengths=torch.tensor([[2, 8, 4]]), longest=8))
    found = Decoupled(temperature=1.0)(f64([[[1], [1], [0]]]), [1.0], context)[0]
    short = 1 / (1 + math.exp(-0.75))
    close(found, [2 / 3 * short, 2 / 3 * (1 - short), -2 / 3])


def test_groups_that_agree_and_missing_rewards_have_no_advantage():
    rewards = f64([[[1, 1], [1, 0]], [[0, 1], [0, 0]], [[NAN, 1], [1, NAN]]])
    assert (Decoupled()(rewards, [1.0, 1.0]) == 0).all()
    found = Decoupled()(f64([[[1, NAN], [NAN, 1], [0, 1]]]), [1.0, 1.0])
    close(found, [[0.5, 0, -0.5]])
    with pytest.raises(ValueError, match="Decoupled: temperature is 0, expected above 0"):
        Decoupled(temperature=0)
