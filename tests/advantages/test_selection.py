from itertools import combinations

import pytest
import torch

from flowgrpo.advantages.group import group_relative
from flowgrpo.advantages.selection import (
    BestWorst,
    Beyond,
    DropZeroVariance,
    Extremes,
    MaxVariance,
    PairedGroups,
    WidthPruning,
    of_nodes,
    siblings,
)
from flowgrpo.types import Context, PromptGroups, RunState
from tests.helpers.refusals import refused

SCORES = torch.tensor([[3.0, 1.0, 4.0, 1.5, 9.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])


def test_best_and_worst_of_each_group_and_groups_without_variance():
    keep = BestWorst(4)(SCORES)
    assert keep[0].tolist() == [False, True, True, True, True, False]  # 1, 1.5 below and 4, 9 above
    assert keep[1].tolist() == [True, True, False, False, True, True]  # ties go by position
    scores = torch.randint(0, 3, (50, 24), generator=torch.Generator().manual_seed(0)).float()
    for n in (2, 8, 24):
        assert (BestWorst(n)(scores).sum(dim=1) == n).all()
    keep = DropZeroVariance()(SCORES)
    assert keep.dtype == torch.bool and keep.tolist() == [[True] * 6, [False] * 6]


@pytest.mark.parametrize("part", [BestWorst(8), MaxVariance(7), MaxVariance(2, last=7)])
def test_a_group_has_enough_samples(part):
    refused(rf"{type(part).__name__}: \w+ is [78], expected at most the 6 samples of", part, SCORES, error=ValueError)


@pytest.mark.parametrize("part", [BestWorst(2), MaxVariance(2), Extremes(), Beyond(0.5), DropZeroVariance(),
                                  WidthPruning()])
def test_every_part_takes_a_context_and_ranks_no_nan(part):
    keep = part(SCORES, Context(RunState(epochs=3)))
    assert keep.dtype == torch.bool and keep.shape == SCORES.shape and torch.equal(keep, part(SCORES))
    if not isinstance(part, DropZeroVariance):  # which ranks nothing
        with pytest.raises(AssertionError):
            part(torch.tensor([[1.0, float("nan"), 2.0]]))


# The largest variance
def test_max_variance_by_hand():
    scores = torch.tensor([[0.5, 1.0, 0.0, 0.45, 0.9, 0.1, 0.55], [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 9.0]])
    keep = MaxVariance(3)(scores)
    assert scores[0][keep[0]].tolist() == pytest.approx([1.0, 0.0, 0.1])
    assert keep[1].sum() == 3 and keep[1, 6]


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
def test_max_variance_beats_every_other_subset(n):
    scores = torch.randn(40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).exp()
    keep = MaxVariance(n)(scores)
    assert (keep.sum(dim=1) == n).all()
    subsets = torch.stack([scores[:, list(rows)].var(dim=1, correction=0) for rows in combinations(range(8), n)])
    chosen = torch.stack([group[kept] for group, kept in zip(scores, keep)]).var(dim=1, correction=0)
    torch.testing.assert_close(chosen, subsets.amax(dim=0), rtol=0, atol=1e-12)


def test_max_variance_relaxes_to_whole_groups():
    part = MaxVariance(2, last=6)
    counts = [int(part(SCORES, Context(RunState(epoch, epochs=9)))[0].sum()) for epoch in range(9)]
    assert counts == [2, 2, 3, 4, 4, 4, 5, 6, 6]  # 2, 2.5, 3, ... rounded to even
    assert part(SCORES)[0].sum() == 2 and MaxVariance(3)(SCORES, Context(RunState(8, epochs=9)))[0].sum() == 3


# Extremes
def test_extremes_by_hand():
    scores = torch.tensor([[0.2, 1.5, -0.4, -0.9, 0.5, 0.6], [0.4, 0.3, 0.2, -0.5, 0.1, 0.0]])
    whole = [[False, True, False, True, False, False], [False, False, False, True, False, False]]
    assert Extremes(-0.5, 0.5)(scores).tolist() == whole
    pairs = [[False, True, False, True, False, True], [False, False, False, True, False, False]]
    assert Extremes(-0.5, 0.5)(scores, Context(groups=PromptGroups(splits=(2,)))).tolist() == pairs
    alone = (scores >= 0.5) | (scores <= -0.5)
    assert torch.equal(Extremes(-0.5, 0.5)(scores, Context(groups=PromptGroups(splits=(6, 1)))), alone)
    assert Extremes(0, 1)(torch.tensor([[2.0, 2.0, 0.0, 0.0]])).tolist() == [[True, False, True, False]]  # of a tie one


# The width of a tree
TREE = torch.tensor([[1.0, 2, 9, 3, 4, 4, 0, 7]])


@pytest.mark.parametrize("part, splits, kept", [
    (WidthPruning(), (2, 2, 2), [1, 2, 4, 7]),  # the better of each pair, a tie by position
    (WidthPruning(), (2, 4), [2, 3, 4, 7]), (WidthPruning(share=0.3), (4,), [2, 7]),
    (WidthPruning(), (), [2, 4, 5, 7]),  # no split is listed: all are siblings
    (WidthPruning(of="depth"), (2, 2, 2), [0, 6, 2, 7]), (WidthPruning(of="depth", share=0.3), (2, 2, 2), [6, 2]),
    (WidthPruning(share=1), (2, 2, 2), range(8))])
def test_width_pruning_by_hand(part, splits, kept):
    assert part(TREE, Context(groups=PromptGroups(splits=splits)))[0].nonzero().flatten().tolist() == sorted(kept)


@pytest.mark.parametrize("nodes, leaves, splits, expected", [
    (2, 16, (2, 2, 2, 2), 2), (16, 16, (2, 2, 2, 2), 2), (6, 24, (2, 4), 2), (24, 24, (2, 4), 4), (3, 24, (2, 4), None),
    (2, 32, (2, 2, 2, 2), None),  # two roots leave no common state
    (8, 8, (), None)])
def test_siblings_follow_from_the_splits_of_the_plan(nodes, leaves, splits, expected):
    assert siblings(nodes, leaves, splits) == expected


def test_inner_nodes_are_pruned_where_it_is_asked_for():
    scores = torch.tensor([[1.0, 2, 4, 3]])
    assert WidthPruning().nodes(scores, 2).all() and WidthPruning(depths="all").nodes(torch.ones(1, 2), None).all()
    assert WidthPruning(depths="all").nodes(scores, 2).tolist() == [[False, True, True, False]]
    assert WidthPruning("depth", depths="all").nodes(scores, 2).tolist() == [[True, False, True, False]]
    leaves = torch.tensor([[True, False, False, False, True, True, False, True]])
    assert of_nodes(BestWorst(2), leaves, scores, (2, 2, 2)).tolist() == [[True, False, True, True]]
    assert of_nodes(WidthPruning(depths="all"), leaves, scores, (2, 2, 2)).tolist() == [[False, True, True, False]]


# Beyond
def test_beyond_by_hand():
    # Distances from 0 of the whole batch: 0 to 7.
    scores = torch.tensor([[0.0, -1.0, 2.0, -3.0], [4.0, -5.0, 6.0, -7.0]])
    assert Beyond(0.5)(scores).tolist() == [[False] * 4, [True] * 4]
    assert Beyond(0.75)(scores).tolist() == [[False] * 4, [False, False, True, True]]
    assert Beyond(0)(scores).all() and Beyond(0.9)(torch.ones(2, 3)).all()


def test_hard_and_easy_groups_are_kept_in_pairs():
    scores = torch.tensor([[1., -1, -1, -1, -1], [0.] * 5, [1, 1, 1, 1, -1], [1, 1, 1, -1, -1], [1, 1, -1, -1, 0],
                           [1, 1, -1, -1, -1]])
    # Hard: 0 with one success, 5 with two; easy: 2 with one failure, 3 with two. As many of each in 4: neither.
    assert PairedGroups()(scores)[:, 0].tolist() == [True, False, True, True, False, True]
    two = PairedGroups()(scores[[0, 1, 2, 3]])
    assert two[:, 0].tolist() == [True, False, True, False] and torch.equal(two, two[:, :1].expand(two.shape))
    # Rare successes and rare failures of a pair weigh the same.
    rewards = torch.tensor([[1.] + [0] * 7, [1] * 7 + [0]])
    advantages = group_relative(rewards) * (8 / 7) ** 0.5  # the population's deviation
    assert advantages[[0, 1], [0, 7]].tolist() == pytest.approx([2.65, -2.65], abs=5e-3)
    assert PairedGroups()(advantages).all()
    # Halves are in no pair; without pairs all groups that differ are kept.
    assert PairedGroups()(torch.tensor([[1., 1, -1, -1], [0.] * 4]))[:, 0].tolist() == [True, False]
