from __future__ import annotations

import math

import pytest
import torch

from flowgrpo.advantages import group_relative
from flowgrpo.advantages.shaping import Binary, Unlikely, WinRate, lifted, unlikely, win_rates
from flowgrpo.types import Context

F64 = torch.float64
NAN = math.nan


def f64(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def close(actual: torch.Tensor, expected: list, atol: float = 1e-10) -> None:
    torch.testing.assert_close(actual, f64(expected), rtol=0, atol=atol, equal_nan=True)


# Unlikely


def test_unlikely_by_hand():
    # Four right samples, from the likeliest to the rarest.
    shaped = unlikely(f64([[[1], [1], [1], [1]]]), f64([[-1, -2, -3, -4]]), 0.25)
    close(shaped[..., 0], [[0.75, 0.8125, 0.875, 0.9375]])
    advantages = group_relative(shaped[..., 0], "group")[0] * math.sqrt(4 / 3)  # the population's deviation
    assert advantages.tolist() == pytest.approx([-1.34, -0.45, 0.45, 1.34], abs=5e-3)


def test_unlikely_by_rank_alone_and_only_where_something_was_earned():
    rewards = f64([[[1, 0.5], [0, NAN], [1, 2], [1, 0]]])
    shaped = Unlikely(0.5)(rewards, Context(logp=f64([[-7, -1, -300, -7]])))
    # Ranks 1, 0, 3, 2 (the tie by position): factors 1 - .5 * 3/4, ..., 1 - .5 * 1/4.
    factors = [0.625, 0.5, 0.875, 0.75]
    close(shaped, [[[0.625, 0.3125], [0, NAN], [0.875, 1.75], [0.75, 0]]])
    close(unlikely(torch.ones(1, 4, 1, dtype=F64), f64([[-7, -1, -300, -7]]), 0.5)[..., 0], [factors])
    close(Unlikely(0)(rewards, Context(logp=f64([[1, 2, 3, 4]]))), rewards.tolist())


def test_unlikely_refuses_what_it_would_turn_round():
    with pytest.raises(ValueError, match="Unlikely: a reward is -2, expected 0 or more"):
        unlikely(f64([[[1], [-2], [NAN]]]), f64([[1, 2, 3]]), 0.25)
    with pytest.raises(ValueError, match="Unlikely reads the samples' log-probabilities, and this method has none"):
        Unlikely()(f64([[[1]]]), Context())
    with pytest.raises(ValueError, match="Unlikely: beta is 1.2"):
        Unlikely(1.2)


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


def test_lifted_by_hand():
    close(lifted(f64([[[0.9], [0.5], [0.4], [0.1]]])), [[[1], [2 / 3], [1 / 3], [0]]])
    # .5 and .4 tie within .1 (and a little), .9 beats both: 1, (0 + 1/2 + 1) / 3 twice, 0.
    close(lifted(f64([[[0.9], [0.5], [0.4], [0.1]]]), 0.11), [[[1], [0.5], [0.5], [0]]])
    close(lifted(f64([[[3, 3], [3, NAN], [NAN, 5], [1, NAN]]])), [[[0.75, 0], [0.75, NAN], [NAN, 1], [0, NAN]]])


def test_lifted_sees_only_the_order():
    scores = torch.rand(6, 8, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(lifted(scores), lifted(scores * 1e-4 + 21)) and torch.equal(lifted(scores), lifted(scores.exp()))
    torch.testing.assert_close(lifted(scores).sum(dim=1), torch.full((6, 2), 4.0, dtype=F64), rtol=0, atol=1e-12)
    assert torch.equal(WinRate()(scores), lifted(scores)) and torch.equal(WinRate(0.2)(scores), lifted(scores, 0.2))


def test_a_group_of_ties_has_no_advantage():
    tied = lifted(f64([[[0.30001], [0.3], [0.30002]]]), 0.01)
    close(tied, [[[0.5], [0.5], [0.5]]])
    assert (group_relative(tied[..., 0]) == 0).all()


def test_a_margin_below_zero_is_refused():
    with pytest.raises(ValueError, match="WinRate: margin is -1"):
        WinRate(-1)


def test_binary_by_hand():
    close(Binary(0.5)(f64([[[0.4, 0.5], [0.6, NAN]]])), [[[0, 1], [1, NAN]]])
    assert Binary(2)(torch.tensor([[[1], [2]]])).tolist() == [[[0.0], [1.0]]]
