"""Boxes and spans of time in completions: values by hand, and what is no key."""

import pytest

from flowgrpo import rewards
from flowgrpo.errors import UserError
from flowgrpo.text.rewards import boxes


def one(name: str, text: str, args: dict | None = None, **metadata) -> float | None:
    found = rewards.score({"r": rewards.find(name, args)}, [text], ["p"], [metadata])[0, 0].item()
    return None if found != found else found


@pytest.mark.parametrize("text, key, expected", [
    ("[0, 0, 10, 10]", [5, 5, 15, 15], 1 / 7), ("[5,5,15,15]", [5, 5, 15, 15], 1), ("none", [5, 5, 15, 15], 0),
    ("[20, 20, 30, 30]", [5, 5, 15, 15], 0), ("[10, 10, 0, 0]", [0, 0, 10, 10], 0),
    ("[0, 0, 10, 10]", [[0, 0, 10, 10], [20, 0, 30, 10]], 0.5),  # a missed one
    ("[0, 0, 10, 10] [20, 0, 30, 10]", [0, 0, 10, 10], 0.5),  # a superfluous one
    ("[20, 0, 30, 10], (0.0, 0, 10, 5)", [[0, 0, 10, 10], [20, 0, 30, 10]], 0.75),
    ("<think>[0,0,1,1]</think><answer>[[0, 0, 10, 10]]</answer>", [0, 0, 10, 10], 1), ("[0,0,9,9]", None, None)])
def test_boxes_are_matched_with_those_of_the_key(text, key, expected):
    assert one("box_iou", text, boxes=key) == pytest.approx(expected)


def test_a_box_is_matched_once():
    assert boxes.matched([(0, 0, 10, 10), (0, 0, 10, 10)], [(0, 0, 10, 10), (20, 0, 30, 10)]) == 0.5


@pytest.mark.parametrize("text, expected", [
    ("see [1, 2, 3, 4] and [0, 0, 20, 10]", 1), ("see [3, 2, 1, 4]", 0), ("see [1, 2, 30, 4]", 0), ("no box", 0),
    ("<think>[1, 2, 3, 4]</think> red", 1), ("[1, 2, 3, 4] [1, 2, 3, 40]", 0), ("[-1, 2, 3, 4]", 0)])
def test_the_format_of_boxes(text, expected):
    assert one("box_format", text, size=[20, 10]) == expected


def test_without_a_size_any_box_from_0_on_is_inside():
    assert one("box_format", "[1, 2, 3000, 4]") == 1 and one("box_format", "[-1, 2, 3, 4]") == 0


@pytest.mark.parametrize("text, expected", [
    ("from 10 to 20 s", 1), ("[15, 25]", 1 / 3), ("0:05-0:15", 1 / 3), ("1:10 - 1:20", 0), ("soon", 0), ("20-10", 0),
    ("<answer>12.5 seconds to 17.5 seconds</answer>", 0.5), ("the answer is 0 to 100. not 10 to 20", 0.1)])
def test_a_span_of_time(text, expected):
    assert one("time_iou", text, span=[10, 20]) == pytest.approx(expected)


def test_an_overlap_below_the_floor_scores_0():
    assert one("time_iou", "[15, 25]", {"floor": 0.3}, span=[10, 20]) == pytest.approx(1 / 3)
    assert one("time_iou", "[15, 25]", {"floor": 0.4}, span=[10, 20]) == 0 and one("time_iou", "1-2") is None


@pytest.mark.parametrize("name, metadata, expected", [
    ("box_iou", {"boxes": [1, 2, 3]}, "expected a box"), ("box_iou", {"boxes": [3, 0, 1, 1]}, "expected a box"),
    ("box_format", {"size": 5}, r"expected \[width, height\]"), ("time_iou", {"span": [2, 1]}, "expected .start, end")])
def test_a_key_that_is_none(name, metadata, expected):
    with pytest.raises(UserError, match=expected):
        one(name, "x", **metadata)
