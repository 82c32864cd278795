"""The arithmetic of a batch."""

import pytest

from flowgrpo.config.geometry import BatchShape, geometry
from flowgrpo.config.sections import Train
from tests.helpers.refusals import message


def train(**options) -> Train:
    return Train(**{"prompts": 8, "group": 12, "micro_batch": 8} | options)


@pytest.mark.parametrize("options, processes, expected", [
    ({}, 1, (8, 96, 8)),  # a group is never cut, however small the micro-batch
    ({}, 4, (2, 24, 2)),
    ({"micro_batch": 1}, 1, (8, 96, 8)),
    ({"micro_batch": 23}, 1, (8, 96, 8)),
    ({"micro_batch": 24}, 1, (8, 96, 4)),
    ({"micro_batch": 40}, 1, (8, 96, 3)),  # 3, 3 and 2 groups
    ({"micro_batch": 40}, 4, (2, 24, 1)),
    ({"micro_batch": 500}, 1, (8, 96, 1)),
    ({"prompts": 1, "group": 2, "micro_batch": 1}, 1, (1, 2, 1))])
def test_rows_and_parts_of_whole_groups(options, processes, expected):
    found = geometry(train(**options), processes)
    assert (found.prompts, found.samples, found.parts) == expected
    assert found.updates == 1


@pytest.mark.parametrize("options, processes, expected", [
    ({}, 64, None),
    ({"group": 24}, 64, (1, 3, 8)),  # an eighth of a group each
    ({}, 3, (8, 4, 3)),  # 2 groups and 2 thirds
    ({"prompts": 3, "group": 4}, 2, (3, 2, 2)),
    ({"prompts": 3, "group": 4}, 12, (1, 1, 4))])
def test_samples_of_a_group_on_several_processes(options, processes, expected):
    if expected is None:
        assert "use 16 or 32 prompts" in message(lambda: geometry(train(**options), processes))
        return
    found = geometry(train(**options), processes)
    assert (found.prompts, found.group, found.slices) == expected


def test_parts_are_slices_or_prompts_of_processes():
    """Groups 0 to 3 in halves, two groups per part; the second of three processes has 2 halves of 1, and 1 of 2."""
    shape = BatchShape(prompts=3, group=2, micro_batch=8, updates=2, slices=2)
    assert shape.repeat_per_slice("ab") == ["a", "a", "b", "b"]
    assert [shape.part_sizes(rank, 3) for rank in range(3)] == [[3], [1, 2], [2, 1]]
    assert [shape.part_of(rank, first) for rank in range(3) for first in range(3)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    whole = BatchShape(prompts=3, group=4, micro_batch=8, updates=1)
    assert whole.part_sizes(1, 3) == [2, 1] and whole.part_of(1, 0) > whole.part_of(0, 2)
    assert geometry(train(updates=8)) == BatchShape(8, 12, 8, 8)
    assert geometry(train(updates=3, micro_batch=40)) == BatchShape(8, 12, 40, 3)
    assert geometry(train(prompts=12, micro_batch=48), 2).parts == 2  # 4 and 2 groups; of one process 4, 4 and 4


@pytest.mark.parametrize("options, processes, told", [
    ({}, 5, "train.prompts is 8 and train.group 12, 96 samples that 5 processes cannot share evenly: use 5 or 10 "
            "prompts"),
    ({"prompts": 2}, 9, "use 3 or 6 prompts"),
    ({"prompts": 2, "updates": 3}, 3, "2 groups of 12 in micro-batches of 8 make 2 parts: use at most 2 updates"),
    ({"updates": 9}, 1, "8 groups of 12 in micro-batches of 8 make 8 parts: use at most 8 updates"),
    ({"updates": 4, "micro_batch": 40}, 1, "make 3 parts: use at most 3 updates, or a micro_batch of 24"),
    ({"updates": 2, "micro_batch": 24}, 4, "2 groups of 12 in micro-batches of 24 make 1 part: use at most 1 update, "
                                           "or a micro_batch of 12"),
    ({"updates": 97, "micro_batch": 1}, 1, "make 8 parts: use at most 8 updates"),
    ({"prompts": 12, "updates": 2, "micro_batch": 48}, 2, "micro-batches of 48 take 4 groups of 12 together, which do "
                                                          "not divide the 6 prompts of each of 2 processes evenly: use "
                                                          "a micro_batch of 36"),
    ({"prompts": 28, "updates": 4, "micro_batch": 60}, 2, "make 3 parts: use at most 3 updates, or a micro_batch of "
                                                          "24")])
def test_what_cannot_work_is_told_with_what_does(options, processes, told):
    assert message(lambda: geometry(train(**options), processes)).endswith(told)


@pytest.mark.parametrize("updates, processes", [*((n, 1) for n in range(2, 9)), (2, 2), (3, 2), (4, 2), (2, 4)])
def test_the_micro_batch_that_is_proposed_works(updates, processes):
    proposed = int(message(lambda: geometry(train(updates=updates, micro_batch=96), processes)).rpartition(" ")[2])
    assert geometry(train(updates=updates, micro_batch=proposed), processes).parts >= updates
