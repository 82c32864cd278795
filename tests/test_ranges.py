"""Ranges of the fields of a part."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from flowgrpo.ranges import above, at_least


def test_fields_within_their_range_pass():
    part = SimpleNamespace(count=1, weight=0.0, lr=1e-9)
    at_least(part, 1, "count")
    at_least(part, 0, "weight", "count")
    above(part, 0, "lr", "count")


@pytest.mark.parametrize("value", [-1, 0, math.nan])
def test_the_first_field_outside_is_named(value):
    part = SimpleNamespace(good=1, wrong=value, other=value)
    with pytest.raises(ValueError, match=f"SimpleNamespace: wrong is {value}, expected 1 or more"):
        at_least(part, 1, "good", "wrong", "other")
    with pytest.raises(ValueError, match=f"SimpleNamespace: wrong is {value}, expected above 0"):
        above(part, 0, "good", "wrong", "other")
