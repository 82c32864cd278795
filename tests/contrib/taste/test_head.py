"""The head of votes: closed forms, the capital as a martingale, sessions without a taste, and minds that change."""

import itertools
import math

import pytest
import torch

from flowgrpo.contrib.taste.head import CHANCE, Belief, observe
from flowgrpo.contrib.taste.votes import SKIP, TIE, Vote

UNIT = torch.tensor([[[0.5**0.5], [-(0.5**0.5)]]])  # a question whose features have the variance 1
PAIR = torch.tensor([[1.0], [0.0]])


def best(features, chosen):
    return features, [float(place == chosen) for place in range(len(features))]


def of_taste(count, generator, width=6, shown=4, sign=1):
    """Votes for the largest first feature, or for the smallest."""
    drawn = torch.randn(count, shown, width, generator=generator)
    return [best(z, int((sign * z[:, 0]).argmax())) for z in drawn]


def believed(votes, blocks=(6,), **options):
    belief = Belief(torch.stack([features for features, _ in votes[:20]]), blocks, **options)
    for at in range(0, len(votes), 20):
        belief.learn(votes[at:at + 20])
    return belief


def right(head, votes) -> int:
    return sum(int(head(features).argmax()) == target.index(1.0) for features, target in votes)


def test_a_vote_on_a_pair_by_hand():
    """The mode of log sigmoid(w) - w^2 / 2 v solves w = v (1 - sigmoid(w)); the variance there is 1 / (1 / v + p q)."""
    belief = Belief(UNIT, [1], deviations=[1.5], half_lives=[math.inf])
    belief.learn([best(PAIR, 0)])
    w, v = float(belief.head().weight), 1.5**2
    p = 1 / (1 + math.exp(-w))
    assert w == pytest.approx(v * (1 - p), rel=1e-6)
    assert float(belief.covariance) == pytest.approx(1 / (1 / v + p * (1 - p)), rel=1e-5)
    assert belief.capital == pytest.approx(0)  # the first prediction is one half
    predicted = 1 / (1 + math.exp(-w / math.sqrt(1 + math.pi / 8 * float(belief.covariance))))
    belief.learn([best(PAIR, 1)])
    assert belief.capital == pytest.approx(math.log(2 * (1 - predicted)), rel=1e-6) and belief.most == 0
    tied = Belief(UNIT, [1])
    assert tied.learn([(PAIR, [0.5, 0.5])]) == (0, 0) and tied.capital == 0 and tied.votes == 1
    assert float(tied.head().weight) == pytest.approx(0, abs=1e-9)


def test_old_votes_lose_their_weight_by_half_lives():
    belief = Belief(UNIT, [1], deviations=[1.5], half_lives=[5])
    belief.learn([best(PAIR, 0)])
    mean, variance = float(belief.mean), float(belief.covariance)
    for _ in range(5):
        belief._drift()
    assert float(belief.mean) == pytest.approx(mean / 2)
    assert float(belief.covariance) == pytest.approx(2.25 - (2.25 - variance) / 4)  # on the way back to the prior


def test_trust_follows_predictions_and_leaves_every_expert_a_share():
    belief = Belief(UNIT, [1], deviations=[1.0, 2.0], half_lives=[math.inf], share=0.1)
    belief._bet(torch.tensor([0.5, 0.25], dtype=torch.double), 4)
    assert belief.capital == pytest.approx(math.log(4 * 0.375))
    assert belief.trust.tolist() == pytest.approx([0.9 * 2 / 3 + 0.05, 0.9 / 3 + 0.05])


@pytest.mark.parametrize("block", [0, 1])
def test_features_that_say_nothing_cost_at_most_two_experts_of_three(block):
    """A third of the experts looks at the other block alone, and bets as if it were the only one."""
    votes = of_taste(60, torch.Generator().manual_seed(4), width=4)
    noise = torch.randn(60, 4, 9, generator=torch.Generator().manual_seed(5))
    wide = [(torch.cat([z, more] if block == 0 else [more, z], 1), target) for (z, target), more in zip(votes, noise)]
    alone = believed(votes, [4], share=0)
    joined = believed(wide, [4, 9] if block == 0 else [9, 4], share=0)
    assert alone.convinced and joined.capital > alone.capital - math.log(3)


def test_the_capital_of_choices_without_a_taste_has_the_mean_one():
    """Over all choices of four questions, whose images may be four, two or tied, and however features look."""
    generator = torch.Generator().manual_seed(3)
    shown = [torch.randn(k, 5, generator=generator) * 3 for k in (4, 2, 4, 3)]
    first = torch.randn(6, 4, 5, generator=generator)
    capitals = []
    for choices in itertools.product(*(range(len(features)) for features in shown)):
        belief = Belief(first, [3, 2])
        belief.learn([best(shown[0], choices[0]), best(shown[1], choices[1])])
        belief.learn([(shown[0], [0.25] * 4), best(shown[2], choices[2]), best(shown[3], choices[3])])
        capitals.append(math.exp(belief.capital))
    assert len(capitals) == 96 and sum(capitals) / 96 == pytest.approx(1, abs=1e-9)
    assert max(capitals) > 2 and min(capitals) < 0.5


@pytest.mark.parametrize("width", [6, 300], ids=["few features", "more features than votes"])
def test_predictions_do_not_go_by_what_comes_later(width):
    votes = of_taste(40, torch.Generator().manual_seed(0), width)
    first = torch.stack([features for features, _ in votes[:20]])
    whole, parts = Belief(first, [width]), Belief(first, [width])
    assert whole.learn(votes) == tuple(map(sum, zip(parts.learn(votes[:20]), parts.learn(votes[20:]))))
    assert whole.capital == pytest.approx(parts.capital, abs=1e-6)
    assert torch.allclose(whole.head().weight, parts.head().weight, atol=1e-7)


@pytest.mark.parametrize("width", [6, 300], ids=["few features", "more features than votes"])
def test_a_taste_is_learned(width):
    generator = torch.Generator().manual_seed(1)
    belief = believed(of_taste(120, generator, width), [width])
    assert right(belief.head(), of_taste(200, generator, width)) > (170 if width == 6 else 80)  # 50 by chance
    assert belief.convinced or width == 300


def test_a_block_of_few_features_is_seen_beside_one_of_many():
    drawn = torch.randn(260, 4, 302, generator=torch.Generator().manual_seed(2))
    votes = [best(z, int(z[:, 301].argmax())) for z in drawn]
    two, one = (right(believed(votes[:60], blocks).head(), votes[60:]) for blocks in ([300, 2], [302]))
    assert two > one + 50


def test_a_mind_that_changes_is_followed():
    """After 60 votes for a taste and 20 against it; without a discount the old taste still holds."""
    generator = torch.Generator().manual_seed(4)
    votes = of_taste(60, generator) + of_taste(20, generator, sign=-1)
    assert float(believed(votes).head().weight[0]) < -1
    assert float(believed(votes, half_lives=[math.inf]).head().weight[0]) > 1


def test_sessions_without_a_taste_are_hardly_ever_taken_for_one():
    """Random choices, always the first and the places in turn, of images in random places: looked at after every vote,
    over 240 sessions of 25 votes."""
    generator = torch.Generator().manual_seed(5)
    taken = 0
    for session in range(240):
        features, places = torch.randn(25, 4, 8, generator=generator), torch.rand(25, 4, generator=generator).argsort(1)
        at_random = torch.randint(4, (25,), generator=generator)
        chosen = (at_random, torch.zeros(25, dtype=torch.long), torch.arange(25) % 4)[session % 3]
        votes = [best(features[at], int(places[at, chosen[at]])) for at in range(25)]
        taken += believed(votes, [6, 2], deviations=[1.0], half_lives=[math.inf, 10]).convinced
    assert taken <= CHANCE * 240


def test_votes_teach_and_constant_features_score_nothing():
    same = Belief(torch.ones(3, 4, 5), [5])
    same.learn([best(torch.ones(4, 5), 0)])
    assert same.head()(torch.ones(2, 5)).tolist() == [0, 0] and same.capital == pytest.approx(0)
    features = torch.arange(8.0).view(4, 2)
    assert observe(features, Vote((0, 1, 2, 3), SKIP)) is None
    rows, shares = observe(features, Vote((1, 0), TIE))
    assert rows.tolist() == [[2, 3], [0, 1]] and shares == [0.5, 0.5]
    assert same.learn([]) == (0, 0)
