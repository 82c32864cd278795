"""Diversity of texts, by hand."""

import pytest

from flowgrpo.errors import UserError
from flowgrpo.text.rewards.embeddings import ReferenceBand, TextDiversity, lexical, likeness, ngrams


def scored(reward, completions, group, answer=None):
    return reward(completions, ["p"] * len(completions), [{"answer": answer} if answer else {}] * len(completions),
                  group)


def test_ngrams_by_hand():
    assert ngrams("A red cat.", 2) == {("a",), ("red",), ("cat",), ("a", "red"), ("red", "cat")}
    assert likeness(ngrams("a b", 1), ngrams("b c", 1)) == pytest.approx(1 / 3)
    assert likeness(set(), set()) == 1 and lexical(["a"], 2) == [0]


def test_what_repeats_in_its_group_loses():
    found = scored(TextDiversity(1), ["a b", "a b", "c d", "a c", "x", "y", "x", "x"], 4)
    # "a b": 0 to its double, 1 to "c d", 2/3 to "a c".
    assert found[:4] == pytest.approx([5 / 9, 5 / 9, (1 + 1 + 2 / 3) / 3, (2 / 3) * 3 / 3])
    assert found[4:] == pytest.approx([1 / 3, 1, 1 / 3, 1 / 3])


def test_distances_of_given_features():
    part = TextDiversity(features=lambda texts: [[float(len(text))] for text in texts])
    assert scored(part, ["a", "abc", "", "ab"], 2) == [2, 2, 2, 2]


def test_inside_the_band_another_answer_is_worth_a_copy_and_diversity_more():
    band = ReferenceBand(deviation=0.5, bonus=0.0, ngram=1)
    copy, near, far, nothing = scored(band, ["a b c", "a b d", "a x y", "z"], 4, "a b c")
    assert copy == near == 1 and far == pytest.approx(0.2 / 0.5) and nothing == 0
    copies = scored(ReferenceBand(0.5, 0.2, ngram=1), ["a b c", "a b c", "a b c", "a b d"], 4, "a b c")
    assert copies[3] > copies[0] == pytest.approx(1 + 0.2 * 0.5 / 3)
    assert scored(band, ["a"], 1) == [None]


@pytest.mark.parametrize("wrong", [lambda: TextDiversity(0), lambda: ReferenceBand(1.0),
                                   lambda: ReferenceBand(bonus=-1)])
def test_settings_out_of_range(wrong):
    with pytest.raises(UserError, match="expected"):
        wrong()
