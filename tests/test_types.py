from __future__ import annotations

import pytest
import torch

from flowgrpo.types import Scored, Segment, Tokens, Trajectory, wide


def test_pairs_come_in_grid_order_and_are_views():
    first, second = torch.arange(12.0).reshape(2, 3, 2), torch.arange(8.0).reshape(2, 2, 2) + 100
    trajectory = Trajectory((Segment(first, (1, 2)), Segment(second, (5,))), final=second[:, -1])
    pairs = list(trajectory.pairs())
    assert [step for step, _, _ in pairs] == [1, 2, 5] == list(trajectory.steps)
    expected = [(first[:, 0], first[:, 1]), (first[:, 1], first[:, 2]), (second[:, 0], second[:, 1])]
    for (_, x, x_next), (state, following) in zip(pairs, expected, strict=True):
        assert torch.equal(x, state) and torch.equal(x_next, following)
        assert x.data_ptr() == state.data_ptr() and x_next.data_ptr() == following.data_ptr()


@pytest.mark.parametrize("steps", [(0,), (0, 1, 2), (0, 2)])
def test_a_segment_has_one_state_more_than_consecutive_steps(steps):
    with pytest.raises(AssertionError):
        Segment(torch.zeros(1, 3, 2), steps)


def test_segments_out_of_grid_order_are_refused():
    states = torch.zeros(1, 2, 2)
    with pytest.raises(AssertionError):
        Trajectory((Segment(states, (3,)), Segment(states, (1,))), final=states[:, -1])


def test_records_refuse_shapes_that_do_not_belong_together():
    with pytest.raises(AssertionError):
        Tokens(torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(AssertionError):
        Scored(torch.zeros(2, 3), torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(AssertionError):
        Scored(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), mean=torch.zeros(3, 2, 4))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((torch.bfloat16,), torch.float32),
        ((torch.int64, torch.float16), torch.float32),
        ((torch.float16, torch.float32), torch.float32),
        ((torch.float32, torch.float64), torch.float64),
    ],
)
def test_wide_is_the_common_dtype_and_float32_at_least(given, expected):
    assert {t.dtype for t in wide(*(torch.zeros(1, dtype=dtype) for dtype in given))} == {expected}
