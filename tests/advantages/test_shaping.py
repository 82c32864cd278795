import math

import pytest
import torch

from flowgrpo.advantages import group_relative
from flowgrpo.advantages.shaping import (
    Balanced,
    Binary,
    Compressed,
    Unlikely,
    WinRate,
    to_win_rates,
    win_rates,
)
from flowgrpo.types import Context, RewardColumns, RunState, SampleMeasures
from tests.helpers.refusals import refused
from tests.helpers.tables import close, f64

F64 = torch.float64
NAN = math.nan


# Unlikely
def drawn(logp: list) -> Context:
    return Context(samples=SampleMeasures(f64(logp)))


def test_unlikely_by_hand():
    # Four right samples, from the likeliest to the rarest.
    shaped = Unlikely(0.25)(f64([[[1], [1], [1], [1]]]), drawn([[-1, -2, -3, -4]]))
    close(shaped[..., 0], [[0.75, 0.8125, 0.875, 0.9375]])
    advantages = group_relative(shaped[..., 0], "group")[0] * math.sqrt(4 / 3)  # the population's deviation
    assert advantages.tolist() == pytest.approx([-1.34, -0.45, 0.45, 1.34], abs=5e-3)


def test_unlikely_by_rank_alone_and_only_where_something_was_earned():
    rewards = f64([[[1, 0.5], [0, NAN], [1, 2], [1, 0]]])
    shaped = Unlikely(0.5)(rewards, drawn([[-7, -1, -300, -7]]))
    # Ranks 1, 0, 3, 2 (the tie by position): factors 1 - .5 * 3/4, ..., 1 - .5 * 1/4.
    factors = [0.625, 0.5, 0.875, 0.75]
    close(shaped, [[[0.625, 0.3125], [0, NAN], [0.875, 1.75], [0.75, 0]]])
    close(Unlikely(0.5)(torch.ones(1, 4, 1, dtype=F64), drawn([[-7, -1, -300, -7]]))[..., 0], [factors])
    close(Unlikely(0)(rewards, drawn([[1, 2, 3, 4]])), rewards.tolist())
    wrong = f64([[[1], [-2], [NAN]]])
    refused("Unlikely: a reward is -2, expected 0 or more", Unlikely(), wrong, drawn([[1, 2, 3]]), error=ValueError)
    told = "Unlikely reads the samples' log-probabilities, and this method has none"
    refused(told, Unlikely(), f64([[[1]]]), Context(), error=ValueError)


# Win rates
def test_win_rates_by_hand():
    # 0 beats 1 and ties with 2; 1 beats 2. The diagonal does not count.
    wins = f64([[9, 1, 0.5], [0, NAN, 1], [0.5, 0, 0]])
    close(win_rates(wins), [0.75, 0.5, 0.25])
    # Only 0 and 1 were compared.
    close(win_rates(f64([[NAN, 1, NAN], [0, NAN, NAN], [NAN, NAN, NAN]])), [1, 0, NAN])


def test_win_rates_of_all_pairs_sum_to_half_the_group():
    upper = torch.randint(0, 3, (20, 7, 7), generator=torch.Generator().manual_seed(0)).double() / 2
    upper = upper.triu(1)
    wins = upper + (1 - upper.mT).tril(-1)
    torch.testing.assert_close(win_rates(wins).sum(dim=1), torch.full((20,), 3.5, dtype=F64), rtol=0, atol=1e-12)


def test_lifted_and_binary_by_hand():
    close(to_win_rates(f64([[[0.9], [0.5], [0.4], [0.1]]])), [[[1], [2 / 3], [1 / 3], [0]]])
    # .5 and .4 tie within .1 (and a little), .9 beats both: 1, (0 + 1/2 + 1) / 3 twice, 0.
    close(to_win_rates(f64([[[0.9], [0.5], [0.4], [0.1]]]), 0.11), [[[1], [0.5], [0.5], [0]]])
    tied = to_win_rates(f64([[[0.30001], [0.3], [0.30002]]]), 0.01)  # a group of ties has no advantage
    close(tied, [[[0.5], [0.5], [0.5]]])
    assert (group_relative(tied[..., 0]) == 0).all()
    close(Binary(0.5)(f64([[[0.4, 0.5], [0.6, NAN]]])), [[[0, 1], [1, NAN]]])
    assert Binary(2)(torch.tensor([[[1], [2]]])).tolist() == [[[0.0], [1.0]]]
    close(to_win_rates(f64([[[3, 3], [3, NAN], [NAN, 5], [1, NAN]]])), [[[0.75, 0], [0.75, NAN], [NAN, 1], [0, NAN]]])


def test_lifted_sees_only_the_order():
    scores = torch.rand(6, 8, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    rates = to_win_rates(scores)
    assert torch.equal(rates, to_win_rates(scores * 1e-4 + 21)) and torch.equal(rates, to_win_rates(scores.exp()))
    torch.testing.assert_close(rates.sum(dim=1), torch.full((6, 2), 4.0, dtype=F64), rtol=0, atol=1e-12)
    assert torch.equal(WinRate()(scores), rates) and torch.equal(WinRate(0.2)(scores), to_win_rates(scores, 0.2))


# Balanced drops
def test_surplus_bad_samples_are_dropped_and_the_rest_centred_anew():
    rewards = f64([[1, 0, 0, 0, 1, 0, 0, NAN], [0] * 8, [1] * 6 + [0, 0]])[..., None]
    found = Balanced()(rewards)[..., 0]
    kept = ~found.isnan()
    assert kept.sum(1).tolist() == [4, 8, 8] and torch.equal(found[kept], rewards[..., 0][kept])
    assert kept[0, [0, 4]].all() and not kept[0, 7]
    close(group_relative(found, "none")[0][kept[0]].sort()[0], [-0.5, -0.5, 0.5, 0.5])
    # The lot falls anew in every epoch, and alike in one.
    lots = {tuple(Balanced()(rewards, Context(RunState(epoch)))[0, :, 0].isnan().tolist()) for epoch in range(12)}
    assert len(lots) > 1 and torch.equal(Balanced()(rewards, Context()).isnan(), Balanced()(rewards).isnan())
    # Right is who has a high weighted sum.
    rewards = f64([[[1, 0], [0, 1], [0, 0], [0, 0]]])
    kept = ~Balanced(right=0.9)(rewards, Context(rewards=RewardColumns(weights=[1.0, 0.5]))).isnan()
    assert kept.all(2).sum() == 2 and kept[0, 0].all() and torch.equal(kept.all(2), kept.any(2))


# Compressed rewards
def test_compressed_rewards_by_hand():
    part = Compressed(threshold=0.5, high=0.1, low=2.0)
    scale = math.expm1(2)
    close(part(f64([[[1], [0.5], [0.25], [0], [NAN]]])),
          [[[0.5 + 0.1 * math.log(1.5)], [0.5], [0.5 - math.expm1(0.5) / scale], [0.5 - math.expm1(1) / scale], [NAN]]])
    # A public trainer of TempSamp-R1 states 0.8018 and 0.087 of its map, whose steepness below 0.8 is 1.
    close(Compressed(low=1.0)(f64([[[1], [0]]])), [[[0.8018], [0.087]]], 5e-4)


def test_a_perfect_sample_no_longer_makes_all_others_bad():
    rewards = f64([[[1], [0.3], [0.35], [0.25]]])
    plain, shaped = group_relative(rewards[..., 0]), group_relative(Compressed()(rewards)[..., 0])
    assert (plain[0, 1:] < 0).all() and shaped[0, 2] >= 0
    assert torch.equal(shaped.argsort(), plain.argsort())
