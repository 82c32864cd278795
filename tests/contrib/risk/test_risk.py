"""Risk-averse advantages over bundles of prompts, by hand."""

import json
import math

import pytest
import torch

from flowgrpo.contrib.risk import RiskAverse, risk_weights
from flowgrpo.types import Context, RunState
from tests.helpers.tables import close, draw, f64

F64 = torch.float64
NAN = math.nan


def test_risk_weights_by_hand():
    # 0 to 10 in steps of 2: the quantiles .2 and .8 are 2 and 8. Tail (r-2)/.2 below 2, band (clip(r, 2, 8) - 8) / .6.
    weights = risk_weights(f64([[0, 2, 4, 6, 8, 10]]), 2.0, 8.0, 0.2, 0.8, 0.5)
    close(weights, [[1.5 * -10 - 10, -10, -20 / 3, -10 / 3, 0, 0]])


def test_risk_weights_are_the_gradient_of_the_mixed_value_at_risk():
    # A policy softmax(theta) over six outcomes, whose quantiles .2 and .8 lie inside the second and the fifth.
    outcomes, alpha, beta, omega = f64([-3, -1, 0, 2, 5, 6]), 0.2, 0.8, 0.7
    theta = torch.zeros(6, dtype=F64, requires_grad=True)
    p = theta.softmax(0)
    ends = p.cumsum(0)
    def between(low: float, high: float) -> torch.Tensor:
        mass = (ends.clamp(max=high) - (ends - p).clamp(min=low)).clamp(min=0)
        return (mass * outcomes).sum() / (high - low)
    ((1 + omega) * between(0, alpha) + between(alpha, beta)).backward()
    low, high = outcomes.quantile(f64([alpha, beta]))
    weights = risk_weights(outcomes[None], low, high, alpha, beta, omega)[0]
    torch.testing.assert_close(theta.grad, (weights - weights.mean()) / 6, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "alpha"), [(10, 0.2), (20, 0.35), (5, 0.4)])
def test_the_tail_weights_give_the_mean_of_the_lowest_share(size, alpha):
    rewards = draw(4, size)
    low = rewards.quantile(alpha, dim=1)
    value = low + (rewards - low[:, None]).clamp(max=0).mean(dim=1) / alpha
    lowest = rewards.sort(dim=1).values[:, : round(alpha * size)].mean(dim=1)
    torch.testing.assert_close(value, lowest, rtol=0, atol=1e-12)
    # With beta 1 and omega 0 the two terms are these and the rest's: together they bring back both means.
    high = rewards.amax(dim=1)
    weights = risk_weights(rewards, low[:, None], high[:, None], alpha, 1.0, 0.0).mean(dim=1)
    rest = rewards.sort(dim=1).values[:, round(alpha * size) :].mean(dim=1)
    torch.testing.assert_close(weights + low + (high - alpha * low) / (1 - alpha), lowest + rest, rtol=0, atol=1e-12)


def test_a_bundle_of_wrong_groups_is_pushed_hardest():
    # Bundles of two groups: of nothing right, with scores 0, 0, 0, 0, and of half and all right, with 1, 1, 1/2, 1/2.
    rewards = f64([[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]])[..., None]
    scores = f64([0, 0, 0, 0, 1, 1, 0.5, 0.5])
    low, high = scores.quantile(f64([0.2, 0.8])).tolist()
    assert (low, high) == pytest.approx((0, 0.8))
    scale = 2.5 * (scores.std(correction=0).item() + 1e-8)
    wrong, half = -0.8 / 0.6 / scale, (0.5 - 0.8) / 0.6 / scale
    advantages = RiskAverse(bundle=2, rate=1.0)(rewards, [1.0], Context())
    close(advantages, [[wrong] * 4] * 2 + [[0, 0, half, half]] * 2)


def test_an_epoch_of_wrong_answers_is_pushed_by_what_earlier_ones_reached():
    part, context = RiskAverse(alpha=0.5, beta=1.0, omega=0.0, bundle=1, rate=0.5), Context()
    assert (part(f64([[[1], [1]]]), [1.0], context) == 0).all()  # nothing to spread yet
    context = Context()
    part(f64([[[0], [1]], [[0], [1]]]), [1.0], context)
    assert context.run.memory["RiskAverse"]["scores"]["after"] == [0.5, 1.0, 0.5]
    # Now the quantiles of 0, 0, 0, 0 are 0: tracked .25, .5 and .25. Tail (0 - .25) / .5, band (.25 - .5) / .5.
    context = Context(RunState(1, memory=json.loads(json.dumps(context.run.memory))))
    pushed = (-0.5 - 0.5) / (2 * (0.25 + 1e-8))
    wrong = f64([[[0], [0]], [[0], [0]]])
    close(part(wrong, [1.0], context), [[pushed] * 2] * 2)
    memory = json.dumps(context.run.memory)
    close(part(wrong, [1.0], context), [[pushed] * 2] * 2)
    assert json.dumps(context.run.memory) == memory


def test_missing_rewards_and_single_samples():
    # The last bundle has one group; a score is the mean of those that there are.
    rewards = f64([[[1], [NAN]], [[0], [NAN]], [[0], [NAN]]])
    found = RiskAverse(bundle=2, rate=1.0)(rewards, [1.0], Context())
    assert (found[:, 1] == 0).all() and found[2, 0] < found[0, 0] == found[1, 0] <= 0
    assert (RiskAverse()(f64([[[NAN], [NAN]]]), [1.0]) == 0).all()
    alone = RiskAverse(bundle=1)(f64([[[1]], [[0]], [[0]]]), [1.0])
    assert RiskAverse().single and alone[0, 0] == 0 and alone[1, 0] < 0
    assert RiskAverse(clamp=1)(f64([[[0], [0], [10]]]), [1.0]).min() >= -1


@pytest.mark.parametrize("wrong", [{"alpha": 0}, {"alpha": 0.8, "beta": 0.8}, {"beta": 1.1}, {"omega": -1},
                                   {"bundle": 0}, {"rate": 0}, {"clamp": 0}])
def test_mistakes_are_named(wrong):
    with pytest.raises(ValueError, match="expected") as error:
        RiskAverse(**wrong)
    assert "\n" not in str(error.value)
