"""The head of votes: closed forms, leave-one-out against refits, and features that say nothing."""

import math

import pytest
import torch

from flowgrpo.contrib.taste import head
from flowgrpo.contrib.taste.head import fit_head, fit_ridge, observe
from flowgrpo.contrib.taste.votes import SKIP, TIE, Vote

GENERATOR = torch.Generator().manual_seed(0)


def of_taste(count: int, width: int = 6, shown: int = 4) -> list[head.Seen]:
    """Votes for the largest first feature."""
    drawn = torch.randn(count, shown, width, generator=GENERATOR)
    return [(z, [float(place == int(z[:, 0].argmax())) for place in range(shown)]) for z in drawn]


def test_shares_of_votes_by_hand_and_ties():
    """Without a ridge, 3 of 4 votes for a difference of 1 give w = log 3; with one, w solves p - 3/4 = -ridge w / 4."""
    pair = torch.tensor([[1.0], [0.0]], dtype=torch.double)
    votes = [(pair, [1.0, 0.0])] * 3 + [(pair, [0.0, 1.0])]
    assert fit_ridge(votes, 1e-9)[0].item() == pytest.approx(math.log(3), abs=1e-6)
    w = fit_ridge(votes, 2.0)[0].item()
    assert 4 / (1 + math.exp(-w)) - 3 == pytest.approx(-2 * w, abs=1e-9)
    # A feature per image: softmax(w) are the shares 1/2, 1/3 and 1/6, up to a constant.
    votes = [(torch.eye(3, dtype=torch.double), [float(place == best) for place in range(3)])
             for best in (0, 0, 0, 1, 1, 2)]
    w = fit_ridge(votes, 1e-9)[0]
    assert (w - w[2]).tolist() == pytest.approx([math.log(3), math.log(2), 0.0], abs=1e-5)
    assert fit_ridge([(pair, [0.5, 0.5])] * 5, 0.1)[0].item() == pytest.approx(0.0, abs=1e-12)


def test_leave_one_out_and_gains_are_those_of_refits():
    votes = [(z.double(), torch.tensor(target, dtype=torch.double)) for z, target in of_taste(30, 4)]
    for ridge in (0.5, 5.0):
        exact = 0.0
        for left in range(len(votes)):
            w = fit_ridge([vote for place, vote in enumerate(votes) if place != left], ridge)[0]
            exact -= float(votes[left][1] @ (votes[left][0] @ w).log_softmax(0))
        gains = head._leave_one_out(votes, ridge)[0] - math.log(4)
        assert float(-gains.mean()) == pytest.approx(exact / len(votes), rel=0.02)
    votes = of_taste(30, 3)
    learned, gains = fit_head(votes, [0.1]), []
    rows = (torch.cat([z for z, _ in votes]).double() - learned.mean) / learned.scale
    groups = [(z, torch.tensor(target, dtype=torch.double)) for z, (_, target) in zip(rows.split(4), votes)]
    for left, (z, target) in enumerate(groups):
        w = fit_ridge([vote for place, vote in enumerate(groups) if place != left], 0.1 * len(votes))[0]
        gains.append(float(target @ (z @ w).log_softmax(0)) + math.log(4))
    assert learned.gain == pytest.approx(sum(gains) / 30, rel=0.02)
    assert learned.error == pytest.approx(torch.tensor(gains).std().item() / 30**0.5, rel=0.05)


@pytest.mark.parametrize("width", [6, 300], ids=["few features", "more features than pictures"])
def test_a_taste_is_learned(width):
    learned = fit_head(of_taste(120, width))
    right, decided = learned.right(of_taste(200, width))
    assert decided == 200 and right > (170 if width == 6 else 60)  # 50 by chance


def test_the_solution_of_rows_beats_chance():
    votes = of_taste(10, 60)
    z = torch.cat([of for of, _ in votes]).double()
    reduced, basis = head._reduce(z)
    whole = fit_ridge([(of.double(), target) for of, target in votes], 0.3)[0]
    own = basis @ fit_ridge([(of, target) for of, (_, target) in zip(reduced.split(4), votes)], 0.3)[0]
    assert torch.allclose(whole, own, atol=1e-8)
    assert fit_head(of_taste(40)).beats_chance()
    drawn = of_taste(200)
    random = [(z, drawn[place - 1][1]) for place, (z, _) in enumerate(drawn)]
    learned = fit_head(random)
    assert not learned.beats_chance() and learned.gain < 2 * learned.error
    assert not fit_head([]).beats_chance() and not fit_head(drawn[:1]).beats_chance()


def test_votes_teach_and_constant_features_score_nothing():
    assert fit_head([])(torch.randn(3, 1)).tolist() == [0, 0, 0]
    same = fit_head([(torch.ones(4, 5), [1.0, 0, 0, 0])])
    assert same(torch.ones(2, 5)).tolist() == [0, 0] and torch.isfinite(same.weight).all()
    features = torch.arange(8.0).view(4, 2)
    assert observe(features, Vote((0, 1, 2, 3), SKIP)) is None
    rows, shares = observe(features, Vote((1, 0), TIE))
    assert rows.tolist() == [[2, 3], [0, 1]] and shares == [0.5, 0.5]
    assert fit_head([(features, [0.0, 0, 0, 1])]).right([(features, [0.25] * 4), (features, [0.0, 0, 0, 1])]) == (1, 1)
