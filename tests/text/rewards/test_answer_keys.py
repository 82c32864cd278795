"""Text rewards without a model, by hand: boxes, choices, diversity, SVG code, and labels from majorities."""

import math

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.text.rewards import boxes, majority
from flowgrpo.text.rewards.code_tests import alike, similarity, sound, svg_of
from flowgrpo.text.rewards.embeddings import ReferenceBand, TextDiversity, lexical, likeness, ngrams
from flowgrpo.text.rewards.rules import MultiChoice, read_choices
from tests.helpers import loop, tiny_text
from tests.helpers.refusals import message


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


def test_boxes_and_overlaps_by_hand():
    assert boxes.match_score([(0, 0, 10, 10), (0, 0, 10, 10)], [(0, 0, 10, 10), (20, 0, 30, 10)]) == 0.5
    assert one("box_format", "[1, 2, 3000, 4]") == 1 and one("box_format", "[-1, 2, 3, 4]") == 0
    assert one("time_iou", "[15, 25]", {"floor": 0.3}, span=[10, 20]) == pytest.approx(1 / 3)
    assert one("time_iou", "[15, 25]", {"floor": 0.4}, span=[10, 20]) == 0 and one("time_iou", "1-2") is None


@pytest.mark.parametrize("text, expected", [
    ("see [1, 2, 3, 4] and [0, 0, 20, 10]", 1), ("see [3, 2, 1, 4]", 0), ("see [1, 2, 30, 4]", 0), ("no box", 0),
    ("<think>[1, 2, 3, 4]</think> red", 1), ("[1, 2, 3, 4] [1, 2, 3, 40]", 0), ("[-1, 2, 3, 4]", 0)])
def test_the_format_of_boxes(text, expected):
    assert one("box_format", text, size=[20, 10]) == expected


@pytest.mark.parametrize("text, expected", [
    ("from 10 to 20 s", 1), ("[15, 25]", 1 / 3), ("0:05-0:15", 1 / 3), ("1:10 - 1:20", 0), ("soon", 0), ("20-10", 0),
    ("<answer>12.5 seconds to 17.5 seconds</answer>", 0.5), ("the answer is 0 to 100. not 10 to 20", 0.1)])
def test_a_span_of_time(text, expected):
    assert one("time_iou", text, span=[10, 20]) == pytest.approx(expected)


@pytest.mark.parametrize("name, metadata, expected", [
    ("box_iou", {"boxes": [1, 2, 3]}, "expected a box"), ("box_iou", {"boxes": [3, 0, 1, 1]}, "expected a box"),
    ("box_format", {"size": 5}, "expected [width, height]"), ("time_iou", {"span": [2, 1]}, "expected [start, end")])
def test_a_key_that_is_none(name, metadata, expected):
    assert expected in message(lambda: one(name, "x", **metadata))


@pytest.mark.parametrize("text, choices", [
    ("A, C", {"A", "C"}), ("(a) and (c).", {"A", "C"}), ("ACD", {"A", "C", "D"}), ("B", {"B"}), ("cat", {"CAT"}),
    ("red; blue", {"RED", "BLUE"}), ("", set()), ("AA", {"AA"})])
def test_choices_that_an_answer_names(text, choices):
    assert read_choices(text) == choices


def test_a_part_of_the_right_choices_has_partial_credit():
    answers = ["A, C", "A", "A, B", "B", "A, B, C, D", "none"]
    metadata = [{"answer": ["a", "C"]}] * len(answers)
    texts = [f"<think>D</think><answer>{answer}</answer>" for answer in answers]
    assert MultiChoice()(texts, [""] * 6, metadata) == pytest.approx([1, 1 / 2, 1 / 3, 0, 1 / 2, 0])
    assert MultiChoice(strict=True)(texts, [""] * 6, metadata) == pytest.approx([1, 1 / 2, 0, 0, 0, 0])
    assert MultiChoice()(["A"], [""], [{}]) == [None]


def scored(reward, completions, group, answer=None):
    return reward(completions, ["p"] * len(completions), [{"answer": answer} if answer else {}] * len(completions),
                  group)


def test_ngrams_and_distances_by_hand():
    assert ngrams("A red cat.", 2) == {("a",), ("red",), ("cat",), ("a", "red"), ("red", "cat")}
    assert likeness(ngrams("a b", 1), ngrams("b c", 1)) == pytest.approx(1 / 3)
    assert likeness(set(), set()) == 1 and lexical(["a"], 2) == [0]
    found = scored(TextDiversity(1), ["a b", "a b", "c d", "a c", "x", "y", "x", "x"], 4)
    # "a b": 0 to its double, 1 to "c d", 2/3 to "a c".
    assert found[:4] == pytest.approx([5 / 9, 5 / 9, (1 + 1 + 2 / 3) / 3, (2 / 3) * 3 / 3])
    assert found[4:] == pytest.approx([1 / 3, 1, 1 / 3, 1 / 3])
    part = TextDiversity(features=lambda texts: [[float(len(text))] for text in texts])
    assert scored(part, ["a", "abc", "", "ab"], 2) == [2, 2, 2, 2]


def test_inside_the_band_another_answer_is_worth_a_copy_and_diversity_more():
    band = ReferenceBand(deviation=0.5, bonus=0.0, ngram=1)
    copy, near, far, nothing = scored(band, ["a b c", "a b d", "a x y", "z"], 4, "a b c")
    assert copy == near == 1 and far == pytest.approx(0.2 / 0.5) and nothing == 0
    copies = scored(ReferenceBand(0.5, 0.2, ngram=1), ["a b c", "a b c", "a b c", "a b d"], 4, "a b c")
    assert copies[3] > copies[0] == pytest.approx(1 + 0.2 * 0.5 / 3)
    assert scored(band, ["a"], 1) == [None]
    for wrong in (lambda: TextDiversity(0), lambda: ReferenceBand(1.0), lambda: ReferenceBand(bonus=-1)):
        assert "expected" in message(wrong)


RECT = '<svg><rect width="1"/></svg>'


@pytest.mark.parametrize("text, code", [
    (f"so: ```svg\n{RECT}\n```", RECT), (f"<svg>a</svg> {RECT} done", RECT), (f"<think>{RECT}</think>none", None),
    ("<svg>", None), ("", None)])
def test_the_code_of_a_completion(text, code):
    assert svg_of(text) == code


@pytest.mark.parametrize("inside, kept", [
    ('<use href="#a"/>', True), ('<image href="data:image/png;base64,AA"/>', True), ('<rect fill="url(#g)"/>', True),
    ("<rect fill=\"url( '#g' )\"/>", True), ('<image href="data:image/svg+xml;base64,AA"/>', False),
    ('<image href="/tmp/a.png"/>', False), ('<image xlink:href = \'file:///a\'/>', False),
    ('<image href="http://x"/>', False), ('<image href=a.png />', False), ("<!ENTITY a 'b'>", False),
    ("<style>@import 'a.css'</style>", False), ('<rect fill="url(http://x)"/>', False),
    ('<use href="#a"/>' * 65, False),
    ("a" * 2000, False)])
def test_code_that_names_something_outside_or_repeats_too_much_is_not_rendered(inside, kept):
    assert sound(f"<svg>{inside}</svg>", 1500) == kept


def test_the_likeness_of_images():
    black, white = torch.zeros(3, 4, 4), torch.ones(3, 4, 4)
    half = torch.zeros(3, 4, 4)
    half[..., 2:] = 1
    assert [similarity(black, other, 0) for other in (black, white)] == [1, 0]
    assert similarity(black, half, 0) == pytest.approx(1 - 0.5**0.5) and similarity(black, half, 1) == 0
    assert similarity(half, half, 0.5) == 1 and similarity(half, 1 - half, 1) == 0  # steps of the other sign
    shifted = [similarity(half, half.roll(by, -1), 0.5) for by in (0, 1, 2)]
    assert shifted == sorted(shifted, reverse=True) and len(set(shifted)) == 3


@pytest.mark.parametrize("one, other, expected", [
    ([1, 0], [3, 0], 1), ([1, 0], [-1, 0], 0), ([1, 0], [0, 2], 1 - 0.5**0.5), ([0, 0], [0, 0], 1)])
def test_the_likeness_of_features(one, other, expected):
    assert alike(torch.tensor([one]).float(), torch.tensor([other]).float()) == pytest.approx(expected)


NAN = math.nan


def pseudo_scores(reward, prompt, answers, memory=None, epoch=None, **metadata) -> list[float]:
    texts = [f"answer: {answer}" for answer in answers]
    count = len(texts)
    return rewards.score({"r": reward}, texts, [prompt] * count, [metadata] * count, count, memory=memory,
                         epoch=epoch)[:, 0].tolist()


@pytest.mark.parametrize("values, expected", [([], 0), ([5], 0), ([0, 1], 1), ([1, 1, 1], 0), ([0, 3, 0], 0),
                                              ([0.2, 0.4, 0.9], 0.35)])
def test_a_slope(values, expected):
    assert majority.slope(values) == pytest.approx(expected)


@pytest.mark.parametrize("history, answer", [
    ([("a", 0.5), ("a", 0.6), ("a", 0.7)], "a"), ([("b", 0.9), ("a", 0.5), ("a", 0.6), ("a", 0.7)], "a"),
    ([("a", 0.7), ("a", 0.6), ("a", 0.5)], None), ([("a", 0.5), ("b", 0.6), ("a", 0.7)], None),
    ([("a", 0.5), ("a", 0.7)], None), ([("a", 0.6)] * 3, None), ([(None, 0.5), (None, 0.6), (None, 0.7)], None)])
def test_a_label_is_replaced_by_a_rising_and_stable_majority(history, answer):
    assert majority.refine_label(history, 3) == answer


def test_labels_give_way_and_trajectories_are_trusted():
    reward, memory = rewards.find("refined_labels", {"window": 2}), {}
    for epoch, (answers, expected) in enumerate([("aaxb", [0, 0, 1, 0]), ("aaab", [1, 1, 1, 0])]):
        for _ in range(2):  # an epoch that is drawn again, as after a resume, is one visit
            assert pseudo_scores(reward, "p", answers, memory, epoch, answer="x") == expected
    assert pseudo_scores(reward, "p", "xxxx", memory, answer="x") == [1] * 4
    assert len(memory["r"]["p"]) == 2 and memory["r"]["p"][-1][0] == 1  # a visit outside of an epoch is none
    assert all(math.isnan(value) for value in pseudo_scores(reward, "q", "ab"))
    # Of ten rising and ten collapsing ones, against a rising mean.
    labelled = majority.mean_trajectory([[0.1, 0.5, 0.9], [0.3, 0.5, 0.7], [0.2]])
    assert labelled == pytest.approx([0.2, 0.5, 0.8])
    good = [[0.1 + 0.01 * i, 0.4 + 0.02 * i, 0.8] for i in range(10)]
    bad = [[0.9, 0.3 - 0.02 * i, 0.05] for i in range(10)]
    assert [majority.alike(each, labelled) >= 0.9 for each in good + bad] == [True] * 10 + [False] * 10
    assert majority.alike([1, 0], [0, 1]) == 0 and majority.alike([], [1]) == 0
    assert majority.alike([1, 2], [2, 4, 9]) == pytest.approx(1)


def test_nothing_is_trusted_without_labels_and_then_scored_once():
    reward, memory = rewards.find("pseudo_labels", {"similarity": 0.95}), {}
    visits = [("xxab", [1, 1, 0, 0], "aabc", None, "aaaa"), ("xxxb", [1, 1, 1, 0], "aaab", [1, 1, 1, 0], "abcd")]
    for epoch, (known, expected, rising, trusted, falling) in enumerate(visits):
        assert pseudo_scores(reward, "labelled", known, memory, epoch, answer="x") == expected
        found = pseudo_scores(reward, "rising", rising, memory, epoch)
        assert found == trusted if trusted else all(map(math.isnan, found))
        assert all(map(math.isnan, pseudo_scores(reward, "falling", falling, memory, epoch)))
    assert [rate for _, _, rate in memory["r"]["rising"]] == [0.5, 0.75]
    reward = rewards.find("pseudo_labels")
    for epoch in range(3):
        assert all(map(math.isnan, pseudo_scores(reward, "p", "aaaa", {}, epoch)))


def test_a_run_keeps_the_memory_of_its_training_prompts_in_the_checkpoint():
    trainer = tiny_text.trainer(rewards={"refined": rewards.find("refined_labels", {"kind": "number"})})
    for prompt in trainer.prompts:
        prompt.metadata["answer"] = "3"
    for trainer.epoch in range(2):
        loop.draw(trainer)
    visited = trainer.memory["rewards"]["refined"]
    assert set(visited) <= set(tiny_text.PROMPTS) and {epoch for visits in visited.values() for epoch, *_ in visits} \
        == {0, 1}
    assert "reward 'r' remembers all prompts, and got 2 processes" in message(
        rewards.require_memory, {"r": rewards.find("pseudo_labels")}, 2)
