"""Choice and writing of prompts: duplicates, rates, mixtures, templates, and prompts of proxy tasks."""

import random

import numpy as np
import pytest

from flowgrpo import rewards
from flowgrpo.data import prompt_writer
from flowgrpo.data.prompt_writer import caption_errors, corrupt, critiques, load_templates, with_inversions
from flowgrpo.data.prompts import Prompt
from flowgrpo.data.selection import best_mixture, deduplicate, mix, rank, within
from tests.helpers.refusals import message, refused


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


def test_near_texts_are_dropped_and_rates_choose():
    given = [Prompt(text) for text in ("A red cat on a mat", "a red  cat, on a mat!", "a red cat on a hat", "two dogs",
                                       "two cats")]
    assert texts(deduplicate(given)) == [given[0].text, given[2].text, "two dogs", "two cats"]
    # Groups of three words: 4 each, 3 of them shared, of 5.
    assert texts(deduplicate(given, 0.6)) == ["A red cat on a mat", "two dogs", "two cats"]
    assert len(deduplicate(given, 0.61)) == 4
    apart = [Prompt("a cat", image="one.png"), Prompt("a cat", image="two.png"), Prompt("a cat")]
    assert deduplicate(apart, 0.5) == apart
    pool = [Prompt(text) for text in "abcde"]
    rates = {"a": [0.2, 0.8, 0.2], "b": [0.0], "c": [1.0, 1.0], "d": [0.0, 0.5]}
    assert texts(within(pool, rates, 0.1, 0.9)) == ["a", "d"] and texts(within(pool, rates, 0.0, 1.0)) == list("abcd")
    assert texts(rank(pool, rates, "hardest")) == ["b", "a", "d", "c"]
    assert texts(rank(pool, rates, "variance")) == ["a", "d", "b", "c"]  # 0.08, 0.0625
    assert texts(rank(pool, rates, "middling")) == ["d", "a", "b", "c"]


def test_mixtures_by_weights_and_by_the_surrogate():
    one, two = [Prompt(f"a{i}") for i in range(30)], [Prompt(f"b{i}") for i in range(10)]
    drawn = texts(mix([one, two], [3.0, 1.0], 10, 0))
    assert sum(text[0] == "a" for text in drawn) == 8 and len(set(drawn)) == 10  # 7.5 and 2.5, the first remainder
    assert drawn != texts(mix([one, two], [3.0, 1.0], 10, 1))
    whole = mix([one, two], [1.0, 1.0], None, 0)
    assert sum(prompt.weight for prompt in whole[:30]) == pytest.approx(20) == sum(p.weight for p in whole[30:])
    assert mix([one], [5.0], None, 0) == one
    assert "set 2 has 10 prompts, and its share is 20" in message(mix, [one, two], [1.0, 1.0], 40, 0)
    target, rng = np.array([0.2, 0.5, 0.3]), np.random.default_rng(3)
    tried = rng.dirichlet(np.ones(3), 10)
    def score(mixtures):
        return 1 - 2 * ((mixtures - target) ** 2).sum(-1)
    best = best_mixture(tried * 7, score(tried))
    assert np.abs(best - target).max() < 0.05 and score(best) > score(np.ones(3) / 3)
    assert best_mixture([[1, 0], [0, 1], [1, 1]], [0.2, 0.9, 0.3]).tolist() == [0, 1]
    assert "5 mixtures of 3 sets: expected at least 6" in message(lambda: best_mixture(tried[:5], [0.0] * 5))


def test_variants_keep_references_and_lines_lose_numbers():
    known = [Prompt("3 owls", metadata={"count": 3}, weight=2.0), Prompt("a cat")]
    answers = {"3 owls": "1. three owls\n2. 3 owls\n3. owls, three of them", "a cat": "three owls\na small cat"}
    asked = []

    def ask(messages):
        asked.append(messages[0]["content"])
        return answers[asked[-1].rpartition("\n")[2]]

    written = prompt_writer.variants(known, 3, ask)
    assert [(prompt.text, prompt.metadata, prompt.weight) for prompt in written] == [
        ("three owls", {"count": 3}, 2.0), ("owls, three of them", {"count": 3}, 2.0), ("a small cat", {}, 1.0)]
    assert all("3 times" in text for text in asked) and len(asked) == 2
    answer = 'Here are two prompts:\n1. "a red hat"\n2) two owls\n\n- 3 cats'
    assert prompt_writer.of_answer(answer) == ["a red hat", "two owls", "3 cats"]


TEMPLATES = """
templates: ["{count} {animal}s", "a {colour} {animal}"]
slots:
  count: {two: 2, three: 3}
  animal: [owl, cat]
  colour: [red, blue, green]
metadata: {task: zoo}
"""


def test_templates_give_all_combinations_and_take_turns(tmp_path):
    (tmp_path / "templates.yaml").write_text(TEMPLATES)
    templates = load_templates(tmp_path / "templates.yaml")
    facts = {prompt.text: prompt.metadata for prompt in templates.write(100, seed=0)}
    assert len(facts) == len(templates.write(100, seed=0)) == 2 * 2 + 3 * 2
    assert facts["two owls"] == {"task": "zoo", "count": 2, "animal": "owl"}
    assert facts["a green cat"] == {"task": "zoo", "colour": "green", "animal": "cat"}
    first, again, *others = (texts(templates.write(4, seed=seed)) for seed in (0, 0, 1, 2, 3))
    assert sum(text.startswith("a ") for text in first) == 2 and first == again
    assert any(first != other for other in others)


@pytest.mark.parametrize("text, told", [
    ("slots: {}", "expected a list under 'templates'"),
    ("templates: ['{animl}']\nslots: {animal: [owl]}", "has the slot 'animl': did you mean 'animal'?"),
    ("templates: ['{animal']\nslots: {animal: [owl]}", "the template '{animal' is not one"),
    ("templates: ['{animal}']\nslots: {animal: []}", "slots.animal: got [], expected a list of words"),
    ("template: ['x']\ntemplates: ['x']", "unknown key 'template': did you mean 'templates'?"),
    ("templates: [", "is not valid YAML: expected the node content")])
def test_mistakes_name_the_key(tmp_path, text, told):
    (tmp_path / "templates.yaml").write_text(text)
    assert told in message(load_templates, tmp_path / "templates.yaml")


CAPTION = "Two dogs and a red car in front of a tall house, a man on the left."


def test_errors_of_captions_are_one_word_that_is_rewarded():
    seen = set()
    for seed in range(40):
        text, wrong, right = corrupt(CAPTION, random.Random(seed))
        assert text.count(wrong) == 1 and wrong not in CAPTION and text.replace(wrong, right) == CAPTION
        assert (text, wrong, right) == corrupt(CAPTION, random.Random(seed))
        seen.add(right)
    assert seen == {"Two", "red", "car", "in front of", "tall", "man", "left"}
    assert corrupt("A leftover redwood.", random.Random(0)) is None
    assert corrupt("left of, and right of", random.Random(0)) is None
    prompts = [Prompt("describe", metadata={"caption": CAPTION}), Prompt("describe", metadata={"caption": "Sky."})]
    [made] = caption_errors(prompts, seed=1)
    answer = made.metadata["answer"]
    assert caption_errors(prompts, seed=1) == [made] and answer in made.text
    assert made.metadata["task"] == "caption_error"
    given = [f"<answer>{answer}</answer>", f"<answer>{answer} house</answer>", made.metadata["right"]]
    found = rewards.score({"r": rewards.find("exact_match")}, given, ["p"] * 3, [made.metadata] * 3)
    assert found[:, 0].tolist() == [1, 0, 0]
    assert "none of 1 prompt has a caption" in message(lambda: caption_errors(prompts[1:]))


def solved(right: int, wrong: int) -> list[Prompt]:
    every = [{"text": f"s{i}", "right": i < right} for i in range(right + wrong)]
    return [Prompt(f"q{i}", metadata={"answer": "1", "solutions": every[i::8]}) for i in range(8)]


def test_a_fifth_of_the_prompts_are_critiques_of_both_kinds():
    made = critiques(solved(10, 10), 0.2)
    asked = [prompt for prompt in made if prompt.metadata.get("task") == "critique"]
    assert len(made) == 10 and sorted(prompt.metadata["answer"] for prompt in asked) == ["right", "wrong"]
    assert all("solutions" not in prompt.metadata for prompt in made) and made == critiques(solved(10, 10), 0.2)
    half, even = ([prompt.metadata["answer"] for prompt in critiques(solved(*counts), share)[8:]]
                  for counts, share in (((10, 2), 0.5), ((8, 8), 0.6)))
    assert len(half) == 8 and half.count("wrong") == 2
    assert even.count("right") / len(even) == 0.5  # a critic that always says right scores the base rate
    for prompt in asked:
        number = int(prompt.text.rpartition("s")[2])
        assert prompt.metadata["answer"] == ("right" if number < 10 else "wrong")
    assert "2 solutions for 8 critiques" in message(lambda: critiques(solved(1, 1), 0.5))
    assert "has 'x', expected" in message(lambda: critiques([Prompt("q", metadata={"solutions": ["x"]})]))


def test_an_inverted_question_has_all_other_choices_for_its_answer():
    prompts = [Prompt("Which? A B C", metadata={"choices": ["A", "B", "C"], "answer": "B"}), Prompt("none")]
    plain, turned = with_inversions(prompts)
    assert (plain.text, plain.metadata["answer"]) == ("Which? A B C", ["B"])
    assert turned.metadata["answer"] == ["A", "C"]
    assert turned.text.startswith("Which? A B C\nName the choices that do NOT")
    found = rewards.score({"r": rewards.find("multi_choice")}, ["<answer>A</answer>", "<answer>C, A</answer>"],
                          ["p"] * 2, [turned.metadata] * 2)
    assert found[:, 0].tolist() == [0.5, 1]
    refused("is .'D'., expected of", with_inversions, [Prompt("q", metadata={"choices": ["A"], "answer": "D"})])
    assert "none of 1 prompt has metadata.choices" in message(lambda: with_inversions(prompts[1:]))
