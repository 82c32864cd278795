"""Prompts of proxy tasks: errors that are where they are said to be, and shares of critiques."""

import random

import pytest

from flowgrpo import rewards
from flowgrpo.data.prompt_writer import caption_errors, corrupt, critiques, with_inversions
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError

CAPTION = "Two dogs and a red car in front of a tall house, a man on the left."


def test_an_error_is_one_expression_that_the_caption_did_not_have():
    seen = set()
    for seed in range(40):
        text, wrong, right = corrupt(CAPTION, random.Random(seed))
        assert text.count(wrong) == 1 and wrong not in CAPTION and text.replace(wrong, right) == CAPTION
        assert (text, wrong, right) == corrupt(CAPTION, random.Random(seed))
        seen.add(right)
    assert seen == {"Two", "red", "car", "in front of", "tall", "man", "left"}


def test_what_has_no_word_to_exchange_is_left_out():
    assert corrupt("A leftover redwood.", random.Random(0)) is None
    assert corrupt("left of, and right of", random.Random(0)) is None


def test_the_exact_span_is_rewarded():
    prompts = [Prompt("describe", metadata={"caption": CAPTION}), Prompt("describe", metadata={"caption": "Sky."})]
    [made] = caption_errors(prompts, seed=1)
    answer = made.metadata["answer"]
    assert caption_errors(prompts, seed=1) == [made] and answer in made.text
    assert made.metadata["task"] == "caption_error"
    texts = [f"<answer>{answer}</answer>", f"<answer>{answer} house</answer>", made.metadata["right"]]
    found = rewards.score({"r": rewards.find("exact_match")}, texts, ["p"] * 3, [made.metadata] * 3)
    assert found[:, 0].tolist() == [1, 0, 0]
    with pytest.raises(UserError, match="none of 1 prompt has a caption"):
        caption_errors(prompts[1:])


def solved(right: int, wrong: int) -> list[Prompt]:
    every = [{"text": f"s{i}", "right": i < right} for i in range(right + wrong)]
    return [Prompt(f"q{i}", metadata={"answer": "1", "solutions": every[i::8]}) for i in range(8)]


def test_a_fifth_of_the_prompts_are_critiques_of_both_kinds():
    made = critiques(solved(10, 10), 0.2)
    asked = [prompt for prompt in made if prompt.metadata.get("task") == "critique"]
    assert len(made) == 10 and sorted(prompt.metadata["answer"] for prompt in asked) == ["right", "wrong"]
    assert all("solutions" not in prompt.metadata for prompt in made) and made == critiques(solved(10, 10), 0.2)
    half = critiques(solved(10, 2), 0.5)
    verdicts = [prompt.metadata["answer"] for prompt in half[8:]]
    assert len(half) == 16 and verdicts.count("wrong") == 2
    always = [float(verdict == "right") for verdict in (p.metadata["answer"] for p in critiques(solved(8, 8), 0.6)[8:])]
    assert sum(always) / len(always) == 0.5  # a critic that always says right scores the base rate
    for prompt in asked:
        number = int(prompt.text.rpartition("s")[2])
        assert prompt.metadata["answer"] == ("right" if number < 10 else "wrong")


def test_too_few_solutions_are_an_error():
    with pytest.raises(UserError, match="2 solutions for 8 critiques"):
        critiques(solved(1, 1), 0.5)
    with pytest.raises(UserError, match="has 'x', expected"):
        critiques([Prompt("q", metadata={"solutions": ["x"]})])


def test_an_inverted_question_has_all_other_choices_for_its_answer():
    prompts = [Prompt("Which? A B C", metadata={"choices": ["A", "B", "C"], "answer": "B"}), Prompt("none")]
    plain, turned = with_inversions(prompts)
    assert (plain.text, plain.metadata["answer"]) == ("Which? A B C", ["B"])
    assert turned.metadata["answer"] == ["A", "C"]
    assert turned.text.startswith("Which? A B C\nName the choices that do NOT")
    found = rewards.score({"r": rewards.find("multi_choice")}, ["<answer>A</answer>", "<answer>C, A</answer>"],
                          ["p"] * 2, [turned.metadata] * 2)
    assert found[:, 0].tolist() == [0.5, 1]
    with pytest.raises(UserError, match="is .'D'., expected of"):
        with_inversions([Prompt("q", metadata={"choices": ["A"], "answer": "D"})])
    with pytest.raises(UserError, match="none of 1 prompt has metadata.choices"):
        with_inversions(prompts[1:])
