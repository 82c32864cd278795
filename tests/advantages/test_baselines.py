from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch
from torch.distributions import Beta

from flowgrpo.advantages import group_relative
from flowgrpo.advantages.baselines import (
    Conditional,
    RiskAverse,
    SameNoise,
    ValueTracker,
    VirtualBest,
    conditional,
    risk_weights,
    virtual_best,
)
from flowgrpo.types import Context
from tests.helpers import tiny
from tests.helpers.tables import close, draw, f64

F64 = torch.float64
NAN = math.nan


# Virtual best


def test_virtual_best_by_hand():
    wrong = -1 / math.sqrt(8)
    close(virtual_best(f64([[0] * 8, [1] * 8, [1] + [0] * 7]), 1.0)[:2], [[wrong] * 8, [0] * 8])
    assert wrong == pytest.approx(-0.354, abs=1e-3)
    # One of eight right and the virtual one: mean 2/9, deviation sqrt(14)/9.
    one = virtual_best(f64([[1] + [0] * 7]), 1.0)[0]
    close(one, [7 / math.sqrt(14)] + [-2 / math.sqrt(14)] * 7)
    assert one[:2].tolist() == pytest.approx([1.87, -0.53], abs=5e-3)


def test_virtual_best_leaves_missing_rewards_out():
    part = VirtualBest(best=2.0)
    full, gap = part(f64([[[0], [1], [2]]]), [1.0]), part(f64([[[0], [NAN], [1], [2]], [[NAN]] * 4]), [1.0])
    assert torch.equal(gap[0, [0, 2, 3]], full[0]) and gap[0, 1] == 0 and (gap[1] == 0).all()
    # A single wrong sample is pushed away too: of 0 and 2 it is one deviation below.
    close(part(f64([[[0]]]), [1.0]), [[-1]])


def test_virtual_best_compares_the_weighted_sum_and_clamps():
    rewards = f64([[[0, 1], [0, 0], [1, 1]]])
    close(VirtualBest(best=3.0, clamp=9)(rewards, [1, 2]), virtual_best(f64([[2, 0, 3]]), 3.0).tolist())
    assert VirtualBest(best=3.0, clamp=0.5)(rewards, [1, 2]).abs().max() == 0.5


def test_a_reward_above_the_best_is_refused():
    with pytest.raises(ValueError, match="VirtualBest: a reward is 1.5, expected at most 1: set best"):
        VirtualBest()(f64([[[0], [1.5], [NAN]]]), [1.0])
    rounded = torch.tensor([[[1.0000001], [0.0]]])
    assert rounded.max() > 1 and VirtualBest()(rounded, [1.0]).isfinite().all()


# Risk


def test_risk_weights_by_hand():
    # 0 to 10 in steps of 2: the quantiles .2 and .8 are 2 and 8. Tail (r-2)/.2 below 2, band (clip(r, 2, 8) - 8) / .6.
    weights = risk_weights(f64([[0, 2, 4, 6, 8, 10]]), 0.2, 0.8, 0.5)
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
    weights = risk_weights(outcomes[None], alpha, beta, omega)[0]
    torch.testing.assert_close(theta.grad, (weights - weights.mean()) / 6, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "alpha"), [(10, 0.2), (20, 0.35), (5, 0.4)])
def test_the_tail_weights_give_the_mean_of_the_lowest_share(size, alpha):
    rewards = draw(4, size)
    low = rewards.quantile(alpha, dim=1)
    value = low + (rewards - low[:, None]).clamp(max=0).mean(dim=1) / alpha
    lowest = rewards.sort(dim=1).values[:, : round(alpha * size)].mean(dim=1)
    torch.testing.assert_close(value, lowest, rtol=0, atol=1e-12)
    # With beta 1 and omega 0 the two terms are these and the rest's: together they bring back both means.
    weights, high = risk_weights(rewards, alpha, 1.0, 0.0).mean(dim=1), rewards.amax(dim=1)
    rest = rewards.sort(dim=1).values[:, round(alpha * size) :].mean(dim=1)
    torch.testing.assert_close(weights + low + (high - alpha * low) / (1 - alpha), lowest + rest, rtol=0, atol=1e-12)


def test_risk_averse_is_scaled_by_the_groups_deviation():
    rewards = f64([[[0], [2], [4], [6], [8], [10]], [[3], [3], [3], [3], [3], [3]]])
    scale = 2.5 * (math.sqrt(14) + 1e-8)
    advantages = RiskAverse(omega=0.5, clamp=99)(rewards, [1.0])
    close(advantages, [[w / scale for w in (-25, -10, -20 / 3, -10 / 3, 0, 0)], [0] * 6])
    assert RiskAverse(clamp=1)(rewards, [1.0]).min() == -1
    gap = RiskAverse(clamp=99)(torch.cat([rewards[:1], f64([[[NAN]]])], dim=1), [1.0])
    assert torch.equal(gap[:, :6], advantages[:1]) and gap[0, 6] == 0
    assert (RiskAverse()(f64([[[NAN], [NAN]]]), [1.0]) == 0).all()


# Conditional


def test_conditional_by_hand():
    # Likely half: rewards 1, 0 (mean 1/2); unlikely half: 3, 1 (mean 2).
    rewards, logp = f64([[1, 3, 0, 1]]), f64([[-1, -8, -2, -9]])
    close(conditional(rewards, logp, 1.0), [[-1, 2.5, -2, 0.5]])  # against the other half
    close(conditional(rewards, logp, 0.0), [[0.5, 1, -0.5, -1]])  # against its own
    close(conditional(rewards, logp, 0.25), [[0.125, 1.375, -0.875, -0.625]])


def test_even_halves_at_one_half_are_the_rewards_less_their_mean():
    rewards, logp = draw(5, 8), draw(5, 8, seed=1)
    torch.testing.assert_close(conditional(rewards, logp, 0.5), group_relative(rewards, "none"), rtol=0, atol=1e-12)
    assert torch.allclose(conditional(rewards, logp, 0.8), conditional(rewards, -logp, 0.8), rtol=0, atol=1e-12)


def test_the_halves_of_ties_and_of_odd_groups():
    # Equal log-probabilities: the first two are the lower half. Of three the middle one goes below.
    close(conditional(f64([[4, 0, 1, 1]]), f64([[7, 7, 7, 7]]), 1.0), [[3, -1, -1, -1]])
    close(conditional(f64([[4, 0, 1]]), f64([[-3, -2, -1]]), 0.0), [[2, -2, 0]])


def test_conditional_leaves_missing_rewards_out():
    # Lower half 4 and nothing, upper half 0, 2; then a half without any reward, compared with the group's mean.
    close(conditional(f64([[4, NAN, 0, 2]]), f64([[0, 1, 2, 3]]), 1.0), [[3, 0, -4, -2]])
    close(conditional(f64([[NAN, NAN, 0, 2]]), f64([[0, 1, 2, 3]]), 1.0), [[0, 0, -1, 1]])
    assert (conditional(f64([[NAN, NAN], [3, 3]]), f64([[0, 1], [0, 1]]), 1.0) == 0).all()


def test_the_conditional_part_reads_log_probabilities():
    rewards, logp = draw(3, 6, 2), draw(3, 6, seed=1)
    total = rewards @ f64([1, 2])
    assert torch.equal(Conditional(0.3, clamp=99)(rewards, [1, 2], Context(logp=logp)), conditional(total, logp, 0.3))
    with pytest.raises(ValueError, match="Conditional reads the samples' log-probabilities, and this method has none"):
        Conditional()(rewards, [1, 2], Context())
    with pytest.raises(ValueError, match=r"of \(3, 6\) samples for rewards of \(3, 2\), expected the same"):
        Conditional()(rewards[:, :2], [1, 2], Context(logp=logp))


# Value tracker


def test_value_tracker_by_hand():
    part, context = ValueTracker(keep=0.5, prior=0.5, evidence=8), Context(prompts=["a", "b"])
    # A = +-1/2, with deviation 1/2. Then a has evidence 5 of which 3 successes, b 2: rates .6 and .4.
    close(part(f64([[[1]], [[0]]]), [1.0], context), [[0.5 / 0.5001], [-0.5 / 0.5001]])
    tracked = context.memory["ValueTracker"]
    assert tracked["a"]["after"] == [5, 3] and tracked["b"]["after"] == [5, 2]
    # A = .4 and -.4, and c from the prior: .5 - .5 = 0. Squares .16, .16, 0 over 3.
    context = Context(["a", "b", "c"], epoch=1, memory=json.loads(json.dumps(context.memory)))
    scale = math.sqrt(0.32 / 3) + 1e-4
    close(part(f64([[[1]], [[0]], [[0.5]]]), [1.0], context), [[0.4 / scale], [-0.4 / scale], [0]])
    assert context.memory["ValueTracker"]["a"]["after"] == [3.5, 2.5]


def test_a_tracker_that_forgets_nothing_is_a_posterior_mean():
    part, context = ValueTracker(keep=1, prior=0.3, evidence=10, floor=0), Context(prompts=["a"])
    outcomes = (torch.rand(6, 5, generator=torch.Generator().manual_seed(0)) < 0.6).double()
    for epoch, rewards in enumerate(outcomes):
        context.epoch = epoch
        part(rewards[None, :, None], [1.0], context)
    rate = Beta(3 + outcomes.sum(), 7 + (1 - outcomes).sum()).mean
    torch.testing.assert_close(part.prompt_weights(context.memory, ["a"]), (rate * (1 - rate)).sqrt()[None])


def test_the_baseline_is_the_one_before_the_batch_for_every_group_of_a_prompt():
    part, context = ValueTracker(keep=0.5), Context(prompts=["a", "b", "a"])
    rewards = f64([[[1], [0]], [[1], [1]], [[1], [NAN]]])
    first = part(rewards, [1.0], context)
    assert context.memory["ValueTracker"]["a"]["after"] == [7, 4] and first[2, 1] == 0
    # Called again in the same epoch it says the same and counts nothing twice.
    memory = json.dumps(context.memory)
    assert torch.equal(part(rewards, [1.0], context), first) and json.dumps(context.memory) == memory


def test_prompts_without_a_reward_keep_their_rate():
    part, context = ValueTracker(), Context(prompts=["a"])
    assert (part(f64([[[NAN], [NAN]]]), [1.0], context) == 0).all() and context.memory["ValueTracker"] == {}


def test_prompt_weights_by_hand():
    tracked = {name: {"epoch": 0, "after": [50, 50 * rate]} for name, rate in (("x", 0.02), ("y", 0.5), ("z", 0.98))}
    weights = ValueTracker().prompt_weights({"ValueTracker": tracked}, ["x", "y", "z", "new"])
    close(weights, [0.19, 0.55, 0.19, 0.55])
    close(ValueTracker(prior=0.0).prompt_weights({}, ["new"]), [0.05])


@pytest.mark.parametrize("wrong", [1.5, -0.2])
def test_rewards_that_are_no_rates_are_refused(wrong):
    with pytest.raises(ValueError, match="ValueTracker: rewards from .* expected within 0 to 1"):
        ValueTracker()(f64([[[0.5], [wrong], [NAN]]]), [1.0], Context(prompts=["a"]))


@pytest.mark.parametrize(
    "call",
    [
        lambda: VirtualBest(clamp=0),
        lambda: RiskAverse(alpha=0),
        lambda: RiskAverse(alpha=0.8, beta=0.8),
        lambda: RiskAverse(beta=1.1),
        lambda: RiskAverse(omega=-1),
        lambda: Conditional(mu=1.5),
        lambda: Conditional(metric="length"),
        lambda: ValueTracker(keep=1.1),
        lambda: ValueTracker(prior=-0.1),
        lambda: ValueTracker(evidence=0),
        lambda: ValueTracker(floor=-1),
    ],
)
def test_mistakes_are_named(call):
    with pytest.raises(ValueError, match="expected") as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("part", [Conditional(), ValueTracker()])
def test_a_part_that_reads_more_than_rewards_needs_a_context(part):
    with pytest.raises(AssertionError):
        part(f64([[[1], [0]]]), [1.0])


def test_a_run_draws_prompts_by_what_the_tracker_remembers():
    trainer = tiny.trainer(parts={"advantage": {"type": "ValueTracker", "floor": 0.01}}, train__prompts=1)
    drawn = []

    def sampled(batch, turn):
        drawn.extend(prompt.text for prompt in batch)
        raise InterruptedError

    trainer.sample = sampled

    def epochs(count: int) -> list[str]:
        drawn.clear()
        for trainer.epoch in range(count):
            with pytest.raises(InterruptedError):
                trainer.run_epoch()
        return list(drawn)

    assert sorted(epochs(6)) == sorted(tiny.PROMPTS)  # nothing is known: a walk through all
    rates = dict(zip(tiny.PROMPTS, (0.5, 0.5, 0.0, 1.0, 0.2, 0.8)))
    trainer.memory["ValueTracker"] = {name: {"epoch": 0, "after": [10, 10 * rate]} for name, rate in rates.items()}
    found = Counter(epochs(3000))
    weights = [math.sqrt(rate * (1 - rate)) + 0.01 for rate in rates.values()]
    for name, weight in zip(tiny.PROMPTS, weights):
        share = weight / sum(weights)
        assert abs(found[name] - 3000 * share) < 5 * math.sqrt(3000 * share * (1 - share))


def test_a_run_with_a_tracker_learns_and_remembers():
    trainer = tiny.trainer(parts={"advantage": {"type": "ValueTracker"}})
    for trainer.epoch in range(2):
        assert math.isfinite(trainer.run_epoch()["loss"])
    assert 2 <= len(trainer.memory["ValueTracker"]) <= 4


# --- the deterministic sample from the same noise --------------------------------------------------------------------

def test_same_noise_by_hand():
    rewards = torch.tensor([[[1.0, 2.0], [3.0, 0.0]], [[0.5, 1.0], [torch.nan, torch.nan]]])
    context = Context(baseline=torch.tensor([[2.0, 2.0], [1.0, 3.0]]))
    # Weighted sums 2 and 3, 1; less what the ODE makes of the same noise.
    assert SameNoise()(rewards, [1.0, 0.5], context).tolist() == [[0, 1], [0, 0]]
    gains = torch.tensor([0.0, 1.0, 0.0])
    scaled = SameNoise("batch")(rewards, [1.0, 0.5], context)
    torch.testing.assert_close(scaled[0, 1], 1 / (gains.std(correction=0) + 1e-4))
    with pytest.raises(ValueError, match="SameNoise: scale is 'group'"):
        SameNoise("group")


def test_same_noise_is_unbiased_and_varies_less_than_no_baseline():
    """One number drawn around its noise; the reward is the number, the score function the draw's deviation."""
    noise, drawn = torch.randn(2, 100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rewards, context = (noise + 0.1 * drawn)[:, None, None], Context(baseline=noise[:, None])
    with_it = SameNoise(clamp=math.inf)(rewards, [1.0], context)[:, 0] * drawn
    without = rewards[:, 0, 0] * drawn
    assert abs(with_it.mean() - 0.1) < 0.01 and abs(without.mean() - 0.1) < 0.02
    assert with_it.var() < 0.1 * without.var()
