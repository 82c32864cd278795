"""Advantages against other baselines than the group's mean, and of right and wrong samples, by hand."""

import math

import pytest
import torch

from flowgrpo.advantages import group_relative
from flowgrpo.advantages.baselines import (
    Conditional,
    Correctness,
    Decoupled,
    SameNoise,
    ShiftedMean,
    VirtualBest,
    conditional,
)
from flowgrpo.types import Context, SampleMeasures
from tests.helpers.refusals import refused
from tests.helpers.tables import close, draw, f64

NAN = math.nan


# Virtual best
def test_virtual_best_by_hand():
    wrong = -1 / math.sqrt(8)
    close(VirtualBest().compare(f64([[0] * 8, [1] * 8, [1] + [0] * 7]), None)[:2], [[wrong] * 8, [0] * 8])
    assert wrong == pytest.approx(-0.354, abs=1e-3)
    # One of eight right and the virtual one: mean 2/9, deviation sqrt(14)/9.
    one = VirtualBest().compare(f64([[1] + [0] * 7]), None)[0]
    close(one, [7 / math.sqrt(14)] + [-2 / math.sqrt(14)] * 7)
    assert one[:2].tolist() == pytest.approx([1.87, -0.53], abs=5e-3)


def test_virtual_best_of_missing_rewards_weighted_sums_and_too_high_ones():
    part = VirtualBest(best=2.0)
    full, gap = part(f64([[[0], [1], [2]]]), [1.0]), part(f64([[[0], [NAN], [1], [2]], [[NAN]] * 4]), [1.0])
    assert torch.equal(gap[0, [0, 2, 3]], full[0]) and gap[0, 1] == 0 and (gap[1] == 0).all()
    # A single wrong sample is pushed away too: of 0 and 2 it is one deviation below.
    close(part(f64([[[0]]]), [1.0]), [[-1]])
    rewards = f64([[[0, 1], [0, 0], [1, 1]]])
    sums = VirtualBest(best=3.0).compare(f64([[2, 0, 3]]), None)
    close(VirtualBest(best=3.0, clamp=9)(rewards, [1, 2]), sums.tolist())
    assert VirtualBest(best=3.0, clamp=0.5)(rewards, [1, 2]).abs().max() == 0.5
    with pytest.raises(ValueError, match="VirtualBest: a reward is 1.5, expected at most 1: set best"):
        VirtualBest()(f64([[[0], [1.5], [NAN]]]), [1.0])
    rounded = torch.tensor([[[1.0000001], [0.0]]])
    assert rounded.max() > 1 and VirtualBest()(rounded, [1.0]).isfinite().all()


# Shifted mean
def test_the_shifted_mean_by_hand():
    # A group that agrees is pulled up by a tenth; of 1, 0, 0, 1 good samples have .6 and bad ones -.4.
    rewards = f64([[[0], [0], [0], [0]], [[1], [0], [0], [1]], [[1], [NAN], [0], [NAN]]])
    close(ShiftedMean()(rewards, [1.0]), [[0.1] * 4, [0.6, -0.4, -0.4, 0.6], [0.6, 0, -0.4, 0]])
    close(ShiftedMean(0.5)(rewards, [1.0])[1:2], [[0, -1, -1, 0]])
    assert ShiftedMean(clamp=0.3)(rewards, [1.0]).abs().max() == 0.3


# Conditional
def test_conditional_by_hand():
    # Likely half: rewards 1, 0 (mean 1/2); unlikely half: 3, 1 (mean 2).
    rewards, logp = f64([[1, 3, 0, 1]]), f64([[-1, -8, -2, -9]])
    close(conditional(rewards, logp, 1.0), [[-1, 2.5, -2, 0.5]])  # against the other half
    close(conditional(rewards, logp, 0.0), [[0.5, 1, -0.5, -1]])  # against its own
    close(conditional(rewards, logp, 0.25), [[0.125, 1.375, -0.875, -0.625]])
    # Equal log-probabilities: the first two are the lower half. Of three the middle one goes above.
    close(conditional(f64([[4, 0, 1, 1]]), f64([[7, 7, 7, 7]]), 1.0), [[3, -1, -1, -1]])
    close(conditional(f64([[4, 0, 1]]), f64([[-3, -2, -1]]), 0.0), [[0, -0.5, 0.5]])
    close(conditional(f64([[4, 0, 1]]), f64([[-3, -2, -1]]), 1.0), [[3.5, -4, -3]])
    # Missing rewards: lower half 4 and nothing, upper half 0, 2; then a half without any, against the group's mean.
    close(conditional(f64([[4, NAN, 0, 2]]), f64([[0, 1, 2, 3]]), 1.0), [[3, 0, -4, -2]])
    close(conditional(f64([[NAN, NAN, 0, 2]]), f64([[0, 1, 2, 3]]), 1.0), [[0, 0, -1, 1]])
    assert (conditional(f64([[NAN, NAN], [3, 3]]), f64([[0, 1], [0, 1]]), 1.0) == 0).all()


def test_even_halves_at_one_half_are_the_rewards_less_their_mean():
    rewards, logp = draw(5, 8), draw(5, 8, seed=1)
    torch.testing.assert_close(conditional(rewards, logp, 0.5), group_relative(rewards, "none"), rtol=0, atol=1e-12)
    assert torch.allclose(conditional(rewards, logp, 0.8), conditional(rewards, -logp, 0.8), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("mu", "published"), [
    (0.0, [0, 0, -0.5, 0.5]), (0.25, [0.1375, 0.1375, -0.625, 0.35]), (0.5, [0.275, 0.275, -0.75, 0.2]),
    (1.0, [0.55, 0.55, -1, -0.1])])
def test_the_factor_of_the_upper_half_is_that_of_the_released_code(mu, published):
    # Outputs of CANON's compute_dr_length_on_mean_group_outcome_advantage: lengths 1 to 4, alpha .9, max_length 1.
    lengths = f64([[1, 2, 3, 4]])
    close(conditional(f64([[1, 1, 0, 1]]), lengths, mu, 0.9), [published])
    # A group that agrees still prefers the shorter half, by mu times the tenth.
    close(conditional(f64([[1, 1, 1, 1]]), lengths, mu, 0.9), [[0.1 * mu] * 2 + [-0.1 * mu] * 2])
    assert (conditional(f64([[1, 1, 1, 1]]), lengths, mu) == 0).all()


def test_the_conditional_part_reads_log_probabilities():
    rewards, logp = draw(3, 6, 2), draw(3, 6, seed=1)
    total = rewards @ f64([1, 2])
    plain = Conditional(0.3, clamp=99)(rewards, [1, 2], Context(samples=SampleMeasures(logp)))
    assert torch.equal(plain, conditional(total, logp, 0.3))
    lengths = f64([[3, 9, 5, 1, 2, 7]] * 3).long()
    measured = Context(samples=SampleMeasures(lengths=lengths))
    longer = Conditional(0.3, "length", upper=0.5, clamp=99)(rewards, [1, 2], measured)
    assert torch.equal(longer, conditional(total, lengths, 0.3, 0.5))
    measured = Context(samples=SampleMeasures(-logp, entropy=logp))
    entropic = Conditional(0.3, "entropy", clamp=99)(rewards, [1, 2], measured)
    assert torch.equal(entropic, conditional(total, logp, 0.3))
    for part, of, context, told in (
            (Conditional(metric="entropy"), rewards, Context(samples=SampleMeasures(logp)),
             "Conditional reads the samples' entropies, and this method has none"),
            (Conditional(), rewards, Context(), "Conditional reads the samples' log-probabilities, and this method"),
            (Conditional(), rewards[:, :2], Context(samples=SampleMeasures(logp)),
             r"of \(3, 6\) samples for rewards of \(3, 2\), expected the same")):
        refused(told, part, of, [1, 2], context, error=ValueError)
    with pytest.raises(AssertionError):  # it needs a context
        Conditional()(f64([[[1], [0]]]), [1.0])


# --- the deterministic sample from the same noise --------------------------------------------------------------------
def test_same_noise_by_hand():
    rewards = torch.tensor([[[1.0, 2.0], [3.0, 0.0]], [[0.5, 1.0], [torch.nan, torch.nan]]])
    context = Context(samples=SampleMeasures(baseline=torch.tensor([[2.0, 2.0], [1.0, 3.0]])))
    # Weighted sums 2 and 3, 1; less what the ODE makes of the same noise.
    assert SameNoise()(rewards, [1.0, 0.5], context).tolist() == [[0, 1], [0, 0]]
    gains = torch.tensor([0.0, 1.0, 0.0])
    scaled = SameNoise("batch")(rewards, [1.0, 0.5], context)
    torch.testing.assert_close(scaled[0, 1], 1 / (gains.std(correction=0) + 1e-4))


def test_same_noise_is_unbiased_and_varies_less_than_no_baseline():
    """One number drawn around its noise; the reward is the number, the score function the draw's deviation."""
    noise, drawn = torch.randn(2, 100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rewards, context = (noise + 0.1 * drawn)[:, None, None], Context(samples=SampleMeasures(baseline=noise[:, None]))
    with_it = SameNoise(clamp=math.inf)(rewards, [1.0], context)[:, 0] * drawn
    without = rewards[:, 0, 0] * drawn
    assert abs(with_it.mean() - 0.1) < 0.01 and abs(without.mean() - 0.1) < 0.02
    assert with_it.var() < 0.1 * without.var()


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


def test_one_reward_groups_that_agree_and_missing_rewards():
    # Of one reward the lengths are the auxiliary.
    context = Context(samples=SampleMeasures(lengths=torch.tensor([[2, 8, 4]]), longest=8))
    found = Decoupled(temperature=1.0)(f64([[[1], [1], [0]]]), [1.0], context)[0]
    short = 1 / (1 + math.exp(-0.75))
    close(found, [2 / 3 * short, 2 / 3 * (1 - short), -2 / 3])
    rewards = f64([[[1, 1], [1, 0]], [[0, 1], [0, 0]], [[NAN, 1], [1, NAN]]])
    assert (Decoupled()(rewards, [1.0, 1.0]) == 0).all()
    found = Decoupled()(f64([[[1, NAN], [NAN, 1], [0, 1]]]), [1.0, 1.0])
    close(found, [[0.5, 0, -0.5]])
