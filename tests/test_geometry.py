"""The arithmetic of a batch."""

from __future__ import annotations

import pytest

from flowgrpo.config import Train
from flowgrpo.errors import UserError
from flowgrpo.geometry import Geometry, geometry


def train(**options) -> Train:
    return Train(**{"prompts": 8, "group": 12, "micro_batch": 8} | options)


@pytest.mark.parametrize("options, processes, expected", [
    ({}, 1, (8, 96, 12)),
    ({}, 4, (2, 24, 3)),
    ({"micro_batch": 7}, 1, (8, 96, 14)),
    ({"micro_batch": 500}, 1, (8, 96, 1)),
    ({"prompts": 1, "group": 2, "micro_batch": 1}, 1, (1, 2, 2)),
])
def test_rows_and_micro_batches(options, processes, expected):
    found = geometry(train(**options), processes)
    assert (found.prompts, found.rows, found.parts) == expected
    assert found.updates == 1


def test_as_many_updates_as_micro_batches():
    assert geometry(train(updates=12)) == Geometry(8, 12, 8, 12)


@pytest.mark.parametrize("options, processes, told", [
    ({}, 3, "train.prompts is 8, which 3 processes cannot share evenly: use 6 or 9"),
    ({"prompts": 2}, 5, "use 5 or 10"),
    ({"updates": 13}, 1, "96 rows in micro-batches of 8 make 12: use at most 12 updates, or a micro_batch of 7"),
    ({"updates": 4}, 4, "24 rows in micro-batches of 8 make 3: use at most 3 updates, or a micro_batch of 6"),
    ({"updates": 97, "micro_batch": 1}, 1, "make 96: use at most 96 updates"),
])
def test_what_cannot_work_is_told_with_what_does(options, processes, told):
    with pytest.raises(UserError) as caught:
        geometry(train(**options), processes)
    assert str(caught.value).endswith(told)


@pytest.mark.parametrize("updates", [13, 20, 50, 96])
def test_the_micro_batch_that_is_proposed_works(updates):
    with pytest.raises(UserError) as caught:
        geometry(train(updates=updates))
    proposed = int(str(caught.value).rpartition(" ")[2])
    assert geometry(train(updates=updates, micro_batch=proposed)).parts >= updates
