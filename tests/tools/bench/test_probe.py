"""Epochs of a finished run that are probed."""

import pytest

from flowgrpo.tools.bench.probe import measured


@pytest.mark.parametrize("every, expected", [(0, [30]), (10, [10, 20, 30]), (20, [20, 30]), (7, [30])])
def test_the_last_checkpoint_is_probed_and_those_that_were_measured(every, expected):
    assert measured([10, 20, 25, 30], every) == expected
