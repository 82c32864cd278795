from __future__ import annotations

import pytest
import torch

from flowgrpo.selection import All, BestWorst, DropZeroVariance

SCORES = torch.tensor([[3.0, 1.0, 4.0, 1.5, 9.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])


def test_all_keeps_everything():
    keep = All()(SCORES)
    assert keep.dtype == torch.bool and keep.shape == SCORES.shape and keep.all()


def test_best_and_worst_of_each_group():
    keep = BestWorst(4)(SCORES)
    assert keep[0].tolist() == [False, True, True, True, True, False]  # 1, 1.5 below and 4, 9 above
    assert keep[1].tolist() == [True, True, False, False, True, True]  # ties go by position


def test_best_worst_keeps_exactly_n_of_each_group():
    scores = torch.randint(0, 3, (50, 24), generator=torch.Generator().manual_seed(0)).float()
    for n in (2, 8, 24):
        assert (BestWorst(n)(scores).sum(dim=1) == n).all()


@pytest.mark.parametrize("n", [0, -2, 3])
def test_best_worst_wants_an_even_number(n):
    with pytest.raises(ValueError, match=f"BestWorst: n is {n}, expected an even number"):
        BestWorst(n)


def test_best_worst_wants_enough_samples():
    with pytest.raises(ValueError, match="BestWorst: n is 8, expected at most the 6 samples of a group"):
        BestWorst(8)(SCORES)


def test_scores_to_rank_by_have_no_nan():
    with pytest.raises(AssertionError):
        BestWorst(2)(torch.tensor([[1.0, float("nan"), 2.0]]))


def test_groups_without_variance_are_dropped_whole():
    keep = DropZeroVariance()(SCORES)
    assert keep.dtype == torch.bool and keep.tolist() == [[True] * 6, [False] * 6]
