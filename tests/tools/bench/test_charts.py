"""Charts of a bench's page."""

import re

import pytest

from flowgrpo.tools.bench.page import LONGEST, bars, shortened


def test_long_labels_keep_their_end():
    names = ["mix_grpo+grpo_guard", "mix_grpo+grpo_guard+texforce"]
    assert [shortened(name) for name in names] == ["mix_grpo+…po_guard", "mix_grpo+…texforce"]
    assert all(len(shortened(name)) == LONGEST for name in names) and shortened("awm") == "awm"
    drawn = bars([(name, 0.5, "0.500") for name in names], "accuracy")
    assert all(f">{shortened(name)}<title>{name}</title>" in drawn for name in names)


def test_a_dot_is_on_the_scale_of_its_bar():
    drawn = bars([("a", 0.25, ""), ("b", 0.5, "")], "accuracy", dots=[0.5, None])
    [dot] = re.findall(r'<circle class="dot" cx="([0-9.]+)" cy="15"', drawn)
    left, widths = re.findall(r'<rect x="(\d+)"', drawn)[0], re.findall(r'width="([0-9.]+)" height="16"', drawn)
    assert float(dot) == pytest.approx(float(left) + 2 * float(widths[0]), abs=0.2)  # both rounded to 0.1
    assert float(dot) == pytest.approx(float(left) + float(widths[1]), abs=0.1)


def test_the_axis_holds_a_dot_beyond_the_bars():
    [dot] = re.findall(r'cx="([0-9.]+)"', bars([("a", 0.25, "")], "accuracy", dots=[1.0]))
    assert float(dot) < 340 - 58
