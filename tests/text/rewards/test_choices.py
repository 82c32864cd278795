"""Partial credit for several choices, by hand."""

import pytest

from flowgrpo.text.rewards.rules import MultiChoice, chosen


@pytest.mark.parametrize("text, choices", [
    ("A, C", {"A", "C"}), ("(a) and (c).", {"A", "C"}), ("ACD", {"A", "C", "D"}), ("B", {"B"}), ("cat", {"CAT"}),
    ("red; blue", {"RED", "BLUE"}), ("", set()), ("AA", {"AA"})])
def test_choices_that_an_answer_names(text, choices):
    assert chosen(text) == choices


def test_a_part_of_the_right_choices_has_partial_credit():
    answers = ["A, C", "A", "A, B", "B", "A, B, C, D", "none"]
    metadata = [{"answer": ["a", "C"]}] * len(answers)
    texts = [f"<think>D</think><answer>{answer}</answer>" for answer in answers]
    assert MultiChoice()(texts, [""] * 6, metadata) == pytest.approx([1, 1 / 2, 1 / 3, 0, 1 / 2, 0])
    assert MultiChoice(strict=True)(texts, [""] * 6, metadata) == pytest.approx([1, 1 / 2, 0, 0, 0, 0])
    assert MultiChoice()(["A"], [""], [{}]) == [None]
