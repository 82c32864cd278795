"""Rewards made of rewards, transforms of scores, and comparisons within a group: tables by hand."""

import math

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.advantages.group import group_relative
from flowgrpo.config import validate
from flowgrpo.config.reward_rules import Change, Clip, RewardRule, Threshold
from flowgrpo.rewards.compose import apply_transform
from flowgrpo.text.rewards import majority
from tests.helpers import loop, tiny_text
from tests.helpers.refusals import message, refused
from tests.helpers.tables import close, f64

NAN = math.nan


def same(found: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, f64(expected), rtol=0, atol=1e-12, equal_nan=True)


def near(found: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=0, atol=1e-10, equal_nan=True)


def combined(name: str, scores: torch.Tensor, **args) -> torch.Tensor:
    """What a reward makes of its parts' scores [B, R]."""
    return rewards.find(name, {"rewards": [RED] * scores.shape[1]} | args).combine(scores)


# --- pure ------------------------------------------------------------------------------------------------------------
def test_tiers_and_gates():
    scores = f64([[1, 1, 0.8],  # all counts
                  [0.5, 1, 0.8],  # the lowest just passes
                  [0.4, 1, 0.8],  # the lowest fails: it counts itself, nothing above it does
                  [1, 0.9, 0.8],  # the middle fails
                  [0, 0, 0.8],
                  [NAN, 1, 0.8],  # what does not apply holds nothing up
                  [1, NAN, 0.8],
                  [0.4, NAN, 0.8],
                  [NAN, NAN, NAN]])
    same(combined("tiered", scores, thresholds=[0.5, 1]), [2.8, 2.3, 0.4, 1.9, 0, 1.8, 1.8, 0.4, NAN])
    same(combined("tiered", scores, thresholds=[0.5, 1], weights=[1, 10, 100]),
         [91, 90.5, 0.4, 10, 0, 90, 81, 0.4, NAN])
    passed = combined("tiered", f64([[1, 0.2], [1, 0.7]]), thresholds=[1])
    failed = combined("tiered", f64([[0, 0.2], [0, 0.7]]), thresholds=[1])
    assert passed[0] < passed[1] and failed[0] == failed[1] < passed[0]
    scores = f64([[1, 0.3, 7], [0.9, 0.3, 7], [1, 0.2, 7], [1, 0.3, -7], [NAN, 0.3, 7], [1, NAN, 7], [1, 0.3, NAN],
                  [0, 0, -7]])
    same(combined("gated", scores, thresholds=[1, 0.3]), [7, 0, 0, -7, 7, 7, NAN, 0])


def test_abstentions_checklists_and_the_harmonic_mean():
    found = combined("ternary", f64([1, 0.8, 0.79, 0.5, 0.21, 0.2, 0, NAN])[:, None], right=0.8, wrong=0.2)
    same(found, [1, 1, 0, 0, 0, -1, -1, 0])
    # Among a group that abstains or is wrong, abstaining is the better one; a binary reward has both at 0.
    abstains, wrong = combined("ternary", f64([[NAN], [0]]), right=1, wrong=0).tolist()
    assert abstains > wrong
    scores = f64([[1, 1, 0.5, 1], [1, 0, 0.5, 0], [1, NAN, 0.4, NAN], [0, 0, 0, 0], [NAN] * 4])
    same(combined("checklist", scores, thresholds=[1, 1, 0.5, 1]), [1, 0.5, 0.5, 0, NAN])
    # 1 / (0.3 / 0.8 + 0.7 / 0.2) = 1 / 3.875, below the arithmetic 0.3 * 0.8 + 0.7 * 0.2 = 0.38.
    both = f64([[0.8, 0.2], [0.5, 0.5], [1, 1], [0, 0.9], [0.5, 0], [-0.1, 0.5], [NAN, 0.5]])
    same(combined("harmonic", both, share=0.3), [1 / 3.875, 0.5, 1, 0, 0, 0, NAN])
    same(combined("harmonic", both[:3], share=1), [0.8, 0.5, 1])
    same(combined("harmonic", both[:3], share=0), [0.2, 0.5, 1])


@pytest.mark.parametrize("false_positive, false_negative", [(0.1, 0.3), (0, 0.4), (0.25, 0), (0, 0), (0.45, 0.5)])
def test_the_corrected_verdict_is_right_in_the_mean(false_positive, false_negative):
    passed, failed = combined("corrected", f64([[1], [0]]), false_positive=false_positive,
                              false_negative=false_negative).tolist()
    assert (1 - false_negative) * passed + false_negative * failed == pytest.approx(1, abs=1e-12)
    assert false_positive * passed + (1 - false_positive) * failed == pytest.approx(0, abs=1e-12)


def test_verdicts_majorities_and_notation():
    close(combined("corrected", f64([[1], [0], [0.5]]), false_positive=0.1, false_negative=0.3),
          [0.9 / 0.6, -0.1 / 0.6, 0.4 / 0.6])
    half = math.log(2)
    assert [majority.certainty(answers) for answers in ("aaaa", "abcd", "aabb", "a")] == pytest.approx(
        [1, 0, 1 - half / math.log(4), 1])
    assert scores_of("majority", {}, [A, A, B, A, C, B, B, B, A, C], 5) == [1, 1, 0, 1, 0, 1, 1, 1, 0, 0]
    assert scores_of("majority", {"score": "share", "certainty": 0.5}, [A, A, A, A], 4) == [1.5] * 4
    assert scores_of("majority", {"kind": "number"}, ["it is 2", "2.0", "3", "two"], 4) == [1, 1, 0, 0]
    assert (group_relative(torch.tensor([scores_of("majority", {}, [A, A], 2)])) == 0).all()
    assert "score is 'mean'" in message(rewards.find, "majority", {"score": "mean"})


# --- for a recipe ----------------------------------------------------------------------------------------------------
def channel(row: int):
    """A reward that is a channel of the image; none where it is above 1."""
    return lambda images, prompts: [None if value > 1 else value for value in images[:, row].mean((1, 2)).tolist()]


RED, GREEN, BLUE = (channel(row) for row in range(3))


def scored(reward, *pixels: tuple[float, float, float], metadata=None) -> list[float]:
    images = torch.tensor(pixels, dtype=torch.float32)[:, :, None, None].expand(-1, -1, 4, 4)
    count = len(pixels)
    return rewards.score({"it": reward}, images, [""] * count, metadata or [{}] * count)[:, 0].tolist()


@pytest.mark.parametrize("name, args, expected", [
    ("tiered", {"rewards": [RED, GREEN, BLUE], "thresholds": [0.5, 0.5]}, [1.75, 0.25, 1.0]),
    ("tiered", {"rewards": [RED, GREEN], "thresholds": [0.5], "weights": [2, 4]}, [3.5, 0.5, 2.5]),
    ("gated", {"rewards": [RED, GREEN], "thresholds": [0.5]}, [0.5, 0, 0.25]),
    ("ternary", {"rewards": [RED], "right": 0.75, "wrong": 0.25}, [1, -1, 1]),
    ("ternary", {"rewards": [GREEN], "right": 0.75, "wrong": 0.25}, [0, 1, -1]),
    ("checklist", {"rewards": [RED, GREEN, BLUE], "thresholds": [0.5, 0.5, 0.5]}, [1, 2 / 3, 2 / 3]),
    ("checklist", {"rewards": [RED, GREEN]}, [0, 0.5, 0]),
    ("harmonic", {"rewards": [RED, GREEN], "share": 0.5}, [0.6, 0.4, 0.375]),
    ("corrected", {"rewards": [RED], "false_positive": 0.25, "false_negative": 0.25}, [1, 0, 1])])
def test_in_a_recipe(name, args, expected):
    found = scored(rewards.find(name, args), (0.75, 0.5, 0.5), (0.25, 1, 0.5), (0.75, 0.25, 0.5))
    assert found == pytest.approx(expected, abs=1e-6)


def test_parts_by_name_and_what_does_not_apply():
    parts = [{"use": "over_saturation", "args": {"limit": 0.0}, "when": {"task": "calm"}}, BLUE]
    reward = rewards.find("tiered", {"rewards": parts, "thresholds": [-0.5]})
    found = scored(reward, (0.5, 0.5, 0.25), (1, 0, 0.25), (1, 0, 0.25),
                   metadata=[{"task": "calm"}, {"task": "calm"}, {}])
    # Channels 0.25 apart, at a limit of 0: -0.25, passed; 1 apart: -1, below the threshold; no route: nothing to pass.
    assert found == pytest.approx([0, -1, 0.25])
    found = scored(rewards.find("checklist", {"rewards": [RED, GREEN]}), (1, 2, 0), (2, 2, 0))
    assert found[0] == 1 and math.isnan(found[1])
    batch = rewards.Batch(torch.full((1, 3, 2, 2), 2.0), [""], [{}])
    assert rewards.find("gated", {"rewards": [RED]})(batch) == [None]


BREAKING = """
def red(images, prompts):
    assert 0.5 not in images[:, 2].mean((1, 2)).tolist()
    return images[:, 0].mean((1, 2))
"""


@pytest.mark.parametrize("name, args, expected", [
    ("tiered", {"thresholds": [0.5]}, [2, NAN, 0.25]), ("gated", {"thresholds": [0.5]}, [1, NAN, 0]),
    ("checklist", {"thresholds": [0.5, 0.5]}, [1, NAN, 0]), ("harmonic", {"share": 0}, [1, NAN, 0.25]),
    ("ternary", {"right": 0.75, "wrong": 0.25}, [1, NAN, -1]), ("corrected", {"false_negative": 0.5}, [2, NAN, 0.5])])
def test_a_part_that_failed_leaves_no_score_and_is_counted(tmp_path, name, args, expected):
    """Three images; the first part breaks on the second one, and its rule skips."""
    (tmp_path / "breaking.py").write_text(BREAKING)
    parts = [{"use": f"{tmp_path}/breaking.py:red", "on_error": "skip"}, GREEN]
    reward = rewards.find(name, {"rewards": parts[:1 if name in ("ternary", "corrected") else 2], **args})
    tally = rewards.Tally()
    pictures = torch.tensor([[1, 1, 0], [1, 1, 0.5], [0.25, 0.25, 0]])[:, :, None, None].expand(-1, -1, 4, 4)
    found = rewards.score({"it": reward}, pictures, [""] * 3, [{}] * 3, tally=tally)[:, 0]
    same(found.double(), expected)
    assert tally.failed == {"it": 1} and "AssertionError" in tally.said["it"]


def test_compositions_compose_and_judge_what_their_parts_judge():
    inner = {"use": "gated", "args": {"rewards": ["sharpness", {"use": "over_saturation"}], "thresholds": [0.0]}}
    found = scored(rewards.find("ternary", {"rewards": [inner], "right": 0, "wrong": -0.5}), (0.5, 0.5, 0.5), (1, 0, 0))
    assert found == [1, -1]
    assert rewards.find("gated", {"rewards": [RED]}).about.modality == "image/video/text"
    assert rewards.find("checklist", {"rewards": [RED, "sharpness"]}).about == rewards.About("image", (0, 1), "",
                                                                                             "the rewards'")
    images = {"it": rewards.find("gated", {"rewards": ["piqe"]})}
    assert "judges image, but what is generated here is video" in message(
        rewards.score, images, torch.zeros(1, 2, 3, 8, 8), [""], [{}])


@pytest.mark.parametrize("transform, scores, expected", [
    ({"clip": [0, 1]}, [[-1.0, 0.25, 1.5, NAN]], [[0.0, 0.25, 1.0, NAN]]),
    ({"threshold": 0.5}, [[0.4, 0.5, 0.6, NAN]], [[0.0, 1.0, 1.0, NAN]]),
    ({"stretch": [0.25, 0.75]}, [[0.0, 0.25, 0.5, 0.75, 2.0, NAN]], [[0.0, 0.0, 0.5, 1.0, 1.0, NAN]]),
    ({"band": [0.4, 0.8], "margin": 0.2}, [[0.1, 0.3, 0.4, 0.8, 0.9, 1.0, NAN]], [[0.0, 0.5, 1, 1, 0.5, 0.0, NAN]]),
    ({"band": [1, 2]}, [[0.9, 1.0, 2.0, 2.1, NAN]], [[0.0, 1.0, 1.0, 0.0, NAN]]),
    ({"budget": 100}, [[0.0, 100.0, 150.0, 200.0, 999.0, NAN]], [[1.0, 1.0, 0.5, 0.0, 0.0, NAN]]),
    ("log", [[1.0, math.e, math.e**-2, NAN]], [[0.0, 1.0, -2.0, NAN]]),
    ("rank", [[3.0, 1.0, 2.0, 9.0, 4.0]], [[0.5, 0.0, 0.25, 1.0, 0.75]]),
    # 1 1 2 take the places 0 1 2: the ties stand at (0 + 1) / 2 of 2.
    ("rank", [[1.0, 2.0, 1.0]], [[0.25, 1.0, 0.25]]),
    ("rank", [[5.0, 5.0, 5.0]], [[0.5, 0.5, 0.5]]),
    ("rank", [[7.0, NAN, -7.0, NAN]], [[1.0, NAN, 0.0, NAN]]),
    ("rank", [[7.0, NAN], [NAN, NAN]], [[0.5, NAN], [NAN, NAN]]),
    # Every group for itself.
    ("rank", [[1.0, 2.0], [20.0, 10.0]], [[0.0, 1.0], [1.0, 0.0]])])
def test_a_transform_of_groups(transform, scores, expected):
    [made] = validate({"reward": {"a": {"transform": [transform]}}}).trained["a"].transform
    scores = torch.tensor(scores, dtype=torch.float64)
    before = scores.clone()
    near(apply_transform(made, scores), expected)
    near(scores, before.tolist())


def composed(**rules) -> dict:
    return {name: rewards.Composed(len, RewardRule(transform=transform)) for name, transform in rules.items()}


def test_each_reward_has_its_own_from_left_to_right_in_every_granularity():
    mine = composed(a=[Clip(clip=(0, 1)), "rank"], b=[], c=[Threshold(threshold=2)])
    scores = torch.tensor([[[3.0, 5, 1], [2, 6, 2]], [[0.5, 7, 3], [0.25, 8, 0]]]).repeat(1, 1, 2)
    before = scores.clone()
    # 3 and 2 are both 1 after the clip: they tie.
    expected = [[[0.5, 5, 0], [0.5, 6, 1]], [[1.0, 7, 1], [0.0, 8, 0]]]
    near(rewards.transform_scores(mine, scores), [[row * 2 for row in group] for group in expected])
    assert torch.equal(scores, before)


def test_the_notation_of_transforms_and_scores_without_any():
    scores = torch.rand(2, 3, 2)
    plain = {"plain": len, "ruled": rewards.Composed(len)}
    near(rewards.transform_scores(plain, scores), scores.tolist())
    assert not any(map(rewards.transforms_of, plain.values()))
    assert rewards.transforms_of(composed(ocr=["log"])["ocr"]) == ["log"]
    for score in (0.0, -0.3):
        told = message(rewards.transform_scores, composed(ocr=["log"]), torch.tensor([[[1.0], [score], [NAN]]]))
        assert told.startswith(f"reward 'ocr': log of the score {score:g}, expected above 0: put a clip such as")
    raw = {"reward": {"a": {"transform": [{"clip": [0, 1]}, "log", "rank", {"threshold": 0.5}]}}}
    assert validate(raw).trained["a"].transform == [Clip(clip=(0, 1)), "log", "rank", Threshold(threshold=0.5)]


RISE = {"start": 0.2, "end": 0.8}


@pytest.mark.parametrize("change, values", [
    (RISE, [0.2, 0.35, 0.5, 0.65, 0.8]), (RISE | {"until": 0.5}, [0.2, 0.5, 0.8, 0.8, 0.8]),
    (RISE | {"stages": 2}, [0.2, 0.2, 0.8, 0.8, 0.8]),
    ({"start": 16, "end": 1, "shape": "geometric"}, [16, 8, 4, 2, 1])])
def test_a_value_over_a_run(change, values):
    [made] = validate({"reward": {"a": {"transform": [{"threshold": change}]}}}).trained["a"].transform
    assert [made.threshold.at(share) for share in (0, 0.25, 0.5, 0.75, 1)] == pytest.approx(values)


def test_budgets_and_bounds_of_factors():
    """256, 230, 207: 256 * 0.9^k in ten stages of one epoch each."""
    change = {"start": 256, "end": 256 * 0.9**9, "shape": "geometric", "stages": 10}
    [made] = validate({"reward": {"a": {"transform": [{"budget": change}]}}}).trained["a"].transform
    assert [round(made.budget.at(epoch / 9)) for epoch in range(4)] == [256, 230, 207, 187]
    near(apply_transform(made, torch.tensor([[256.0]]), 0.0), [[1.0]])
    near(apply_transform(made, torch.tensor([[256.0]]), 2 / 9), [[1 - (256 - 256 * 0.81) / (256 * 0.81)]])
    rule = {"stretch": [{"start": 0.1, "end": 0.5}, {"start": 0.6, "end": 0.9}]}
    [made] = validate({"reward": {"a": {"transform": [rule]}}}).trained["a"].transform
    early, late = (apply_transform(made, f64([[0.2, 0.55, 0.7]]), share) for share in (0, 1))
    near(early, [[0.2, 0.9, 1.0]])
    near(late, [[0.0, 0.125, 0.5]])


@pytest.mark.parametrize("transform, told", [
    ({"clip": [{"start": 0, "end": 2}, 1]}, "the lower bound below the upper one, throughout the run"),
    ({"budget": {"start": 5, "end": 0}}, "a budget above 0"),
    ({"threshold": {"start": 0, "end": 1, "shape": "geometric"}}, "of the same sign, neither of them 0"),
    ({"threshold": {"start": 0, "ende": 1}}, "unknown key .*ende': did you mean 'end'")])
def test_a_change_that_cannot_be(transform, told):
    refused(told, validate, {"reward": {"a": {"transform": [transform]}}})


def test_a_run_moves_a_threshold_from_its_first_epoch_to_its_last():
    composed = rewards.Composed(tiny_text.short, RewardRule(transform=[Threshold(threshold=Change(start=1, end=3))]))
    trainer = tiny_text.trainer(rewards={"short": composed}, train__epochs=3)
    progress = []
    for trainer.epoch in range(3):
        loop.draw(trainer)
        progress.append(trainer.scoring.progress)
        near(trainer.scoring.transform(torch.tensor([[[1.0], [2.0], [3.0]]])).flatten(),
             [float(score >= 1 + trainer.epoch) for score in (1, 2, 3)])
    assert progress == [0, 0.5, 1]


A, B, C = "answer: a", "answer: b", "answer: c"


def scores_of(name, args, texts, group) -> list[float]:
    return rewards.score({"r": rewards.find(name, args)}, texts, ["p"] * len(texts), [{}] * len(texts),
                         group)[:, 0].tolist()


@pytest.mark.parametrize("answers, agree, share", [
    ("aabac", [1, 1, 0, 1, 0], [0.6, 0.6, 0.2, 0.6, 0.2]), ("ba", [1, 0], [0.5, 0.5]), ("aa", [1, 1], [1, 1]),
    ([None, None, "a"], [0, 0, 1], [0, 0, 1 / 3]), ([None, None], [0, 0], [0, 0])])
def test_the_majority_of_a_group(answers, agree, share):
    assert majority.agreement(list(answers)) == agree and majority.frequencies(list(answers)) == pytest.approx(share)
