"""Choice of prompts: duplicates, rates, mixtures and their surrogate, by hand."""

import numpy as np
import pytest

from flowgrpo.data.prompt_writer import variant_request, variants
from flowgrpo.data.prompts import Prompt
from flowgrpo.data.selection import best_mixture, deduplicated, mix, ranked, within
from flowgrpo.errors import UserError


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


def test_repeated_and_near_texts_are_dropped():
    given = [Prompt(text) for text in ("A red cat on a mat", "a red  cat, on a mat!", "a red cat on a hat", "two dogs",
                                       "two cats")]
    assert texts(deduplicated(given)) == [given[0].text, given[2].text, "two dogs", "two cats"]
    # Groups of three words: 4 each, 3 of them shared, of 5.
    assert texts(deduplicated(given, 0.6)) == ["A red cat on a mat", "two dogs", "two cats"]
    assert len(deduplicated(given, 0.61)) == 4
    apart = [Prompt("a cat", image="one.png"), Prompt("a cat", image="two.png"), Prompt("a cat")]
    assert deduplicated(apart, 0.5) == apart


def test_prompts_by_their_rates():
    pool = [Prompt(text) for text in "abcde"]
    rates = {"a": [0.2, 0.8, 0.2], "b": [0.0], "c": [1.0, 1.0], "d": [0.0, 0.5]}
    assert texts(within(pool, rates, 0.1, 0.9)) == ["a", "d"] and texts(within(pool, rates, 0.0, 1.0)) == list("abcd")
    assert texts(ranked(pool, rates, "hardest")) == ["b", "a", "d", "c"]
    assert texts(ranked(pool, rates, "variance")) == ["a", "d", "b", "c"]  # 0.08, 0.0625
    assert texts(ranked(pool, rates, "middling")) == ["d", "a", "b", "c"]


def test_sets_are_mixed_by_weights():
    one, two = [Prompt(f"a{i}") for i in range(30)], [Prompt(f"b{i}") for i in range(10)]
    drawn = texts(mix([one, two], [3.0, 1.0], 10, 0))
    assert sum(text[0] == "a" for text in drawn) == 8 and len(set(drawn)) == 10  # 7.5 and 2.5, the first remainder
    assert drawn != texts(mix([one, two], [3.0, 1.0], 10, 1))
    whole = mix([one, two], [1.0, 1.0], None, 0)
    assert sum(prompt.weight for prompt in whole[:30]) == pytest.approx(20) == sum(p.weight for p in whole[30:])
    assert mix([one], [5.0], None, 0) == one
    with pytest.raises(UserError, match="set 2 has 10 prompts, and its share is 20"):
        mix([one, two], [1.0, 1.0], 40, 0)


def test_the_surrogate_finds_the_best_mixture():
    target, rng = np.array([0.2, 0.5, 0.3]), np.random.default_rng(3)
    tried = rng.dirichlet(np.ones(3), 10)
    def score(mixtures):
        return 1 - 2 * ((mixtures - target) ** 2).sum(-1)
    best = best_mixture(tried * 7, score(tried))
    assert np.abs(best - target).max() < 0.05 and score(best) > score(np.ones(3) / 3)
    assert best_mixture([[1, 0], [0, 1], [1, 1]], [0.2, 0.9, 0.3]).tolist() == [0, 1]
    with pytest.raises(UserError, match="5 mixtures of 3 sets: expected at least 6"):
        best_mixture(tried[:5], [0.0] * 5)


def test_variants_keep_the_reference():
    known = [Prompt("3 owls", metadata={"count": 3}, weight=2.0), Prompt("a cat")]
    answers = {"3 owls": "1. three owls\n2. 3 owls\n3. owls, three of them", "a cat": "three owls\na small cat"}
    written = variants(known, 3, lambda messages: answers[messages[0]["content"].rpartition("\n")[2]])
    assert [(prompt.text, prompt.metadata, prompt.weight) for prompt in written] == [
        ("three owls", {"count": 3}, 2.0), ("owls, three of them", {"count": 3}, 2.0), ("a small cat", {}, 1.0)]
    assert "3 times" in variant_request("x", 3)[0]["content"]
