"""Labels from majorities over a run: slopes, trajectories and replacements by hand, and their memory."""

import math

import pytest

from flowgrpo import rewards
from flowgrpo.errors import UserError
from flowgrpo.text.rewards import majority
from tests.helpers import loop, tiny_text

NAN = math.nan


def scored(reward, prompt, answers, memory=None, epoch=None, **metadata) -> list[float]:
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
    assert majority.refined(history, 3) == answer


def test_a_wrong_label_gives_way_in_a_run():
    reward, memory = rewards.find("refined_labels", {"window": 2}), {}
    for epoch, (answers, expected) in enumerate([("aaxb", [0, 0, 1, 0]), ("aaab", [1, 1, 1, 0])]):
        for _ in range(2):  # an epoch that is drawn again, as after a resume, is one visit
            assert scored(reward, "p", answers, memory, epoch, answer="x") == expected
    assert scored(reward, "p", "xxxx", memory, answer="x") == [1] * 4
    assert len(memory["r"]["p"]) == 2 and memory["r"]["p"][-1][0] == 1  # a visit outside of an epoch is none
    assert all(math.isnan(value) for value in scored(reward, "q", "ab"))


def test_trajectories_like_the_labelled_ones_are_trusted():
    """Of ten rising and ten collapsing ones, against a rising mean."""
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
        assert scored(reward, "labelled", known, memory, epoch, answer="x") == expected
        found = scored(reward, "rising", rising, memory, epoch)
        assert found == trusted if trusted else all(map(math.isnan, found))
        assert all(map(math.isnan, scored(reward, "falling", falling, memory, epoch)))
    assert [rate for _, _, rate in memory["r"]["rising"]] == [0.5, 0.75]
    reward = rewards.find("pseudo_labels")
    for epoch in range(3):
        assert all(map(math.isnan, scored(reward, "p", "aaaa", {}, epoch)))


def test_a_run_keeps_the_memory_of_its_training_prompts_in_the_checkpoint():
    trainer = tiny_text.trainer(rewards={"refined": rewards.find("refined_labels", {"kind": "number"})})
    for prompt in trainer.prompts:
        prompt.metadata["answer"] = "3"
    for trainer.epoch in range(2):
        loop.draw(trainer)
    visited = trainer.memory["rewards"]["refined"]
    assert set(visited) <= set(tiny_text.PROMPTS) and {epoch for visits in visited.values() for epoch, *_ in visits} \
        == {0, 1}
    with pytest.raises(UserError, match="reward 'r' remembers all prompts, and got 2 processes"):
        rewards.require_memory({"r": rewards.find("pseudo_labels")}, 2)
