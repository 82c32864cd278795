"""Credit of a text's steps and the length term, by hand."""

import math

import pytest
import torch

from flowgrpo.text.credit import LengthSwitch, StepScores, merged_steps, shortened, text_steps
from flowgrpo.training import sampling
from flowgrpo.types import Context, SampleMeasures, Scored, Segmented
from tests.helpers import tiny_runs
from tests.helpers.refusals import message

NAN = torch.nan
# A group of three samples with 3, 3 and 2 steps; the last token of the third was not drawn.
SEGMENTS = torch.tensor([[0, 1, 1, 2], [0, 0, 1, 2], [0, 1, 1, 1]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
TOTALS = torch.tensor([[1.0, 0.0, 0.5]])
NONE = torch.zeros(3)


def taken(scores) -> Segmented:
    ids = torch.zeros(3, 4, dtype=torch.int64)
    return Segmented(ids, torch.zeros(3, dtype=torch.int64), Scored(torch.zeros(3, 4), MASK), SEGMENTS,
                     torch.tensor(scores))


def test_steps_end_with_a_text_and_differ_in_one():
    assert text_steps([*"1\n23\n4"], "\n", "".join) == [2, 5, 6]
    assert text_steps([*"ab. c. "], ". ", "".join) == [4, 7]
    assert text_steps([*"abc"], "\n", "".join) == [3] and text_steps([], "\n", "".join) == []
    found = StepScores("group")(taken([[0.5, 1.0, 0.2], [0.5, 0.0, 0.2], [0.5, 0.5, NAN]]), NONE, TOTALS)
    torch.testing.assert_close(found, torch.tensor([[0.0, 1, 1, 0], [0, 0, -1, 0], [0, 0, 0, 0]]))
    found = StepScores("group")(taken([[0.5, 0.5, 3.0], [0.5, 0.5, 1.0], [0.5, 0.5, NAN]]), NONE, TOTALS)
    half = 2**0.5 / 2
    torch.testing.assert_close(found, torch.tensor([[0, 0, 0, half], [0, 0, 0, -half], [0.0] * 4]))


def test_criticised_steps_and_false_alarms():
    outcome = torch.tensor([1.0, -0.5, 0.25])
    part = StepScores("blame", weight=0.3)
    found = part(taken([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [NAN, 1.0, NAN]]), outcome, TOTALS)
    expected = torch.tensor([[1, 0.7, 0.7, 1], [-0.5] * 4, [0.25, 0.25, 0.25, 0]])
    torch.testing.assert_close(found, expected)
    votes = torch.tensor([[1.0, 0, 1], [0, 0, 1], [NAN, NAN, NAN], [1, NAN, 0]])
    assert StepScores(votes=3).voted(votes).tolist()[:2] == [1, 0]
    assert StepScores(votes=3).voted(votes)[2].isnan() and StepScores(votes=3).voted(votes)[3] == 0
    assert StepScores().voted(torch.tensor([[0.3], [0.9]])).tolist() == pytest.approx([0.3, 0.9])


def test_potentials_and_progress_add_up():
    found = StepScores("potential", weight=2.0)(
        taken([[0.6, 0.7, 0.1], [0.4, 0.4, 0.1], [0.9, 0.1, NAN]]), torch.tensor([1.0, 0.0, 0.0]), TOTALS)
    # Scores behind the steps but the last: .6, .7 / .4, .4 / .9; the sums of the steps' credits are 0.
    expected = torch.tensor([[2.2, 1.2, 1.2, -0.4], [0.8, 0.8, 0.0, -0.8], [1.8, -1.8, -1.8, 0.0]])
    torch.testing.assert_close(found, expected)
    part = StepScores("progress", outcome=0.0)
    found = part(taken([[0.6, 0.7, 0.1], [0.4, 0.4, 0.1], [0.9, 0.1, NAN]]), NONE, TOTALS)
    expected = torch.tensor([[0.1, 0.1, 0.1, 0.3], [-0.1, -0.1, 0.0, -0.4], [0.4, -0.4, -0.4, 0.0]])
    torch.testing.assert_close(found, expected)
    sums = [sum(row[SEGMENTS[at] == step][0].item() for step in SEGMENTS[at].unique()) for at, row in enumerate(found)]
    assert sums == pytest.approx([0.5, -0.5, 0.0], abs=1e-6)


def test_thoughts_and_weights_of_steps():
    scores = torch.tensor([[1.0, 0.8, 0.0, 0.2, 1.0], [0.0, 1.0, NAN, NAN, NAN]])
    segments = torch.tensor([[0, 1, 2, 2, 3, 4], [0, 0, 1, 1, 1, 1]])
    merged, values = merged_steps(segments, scores, 0.5)
    assert merged.tolist() == [[0, 0, 1, 1, 1, 2], [0, 0, 1, 1, 1, 1]]
    torch.testing.assert_close(values[0, :3], torch.tensor([0.9, 0.1, 1.0]))
    torch.testing.assert_close(values[1, :2], torch.tensor([0.0, 1.0]))
    given = taken([[0.5, 1.0, 0.2], [0.5, 0.0, 0.2], [0.5, 0.5, NAN]])
    eased = StepScores("group", easing=True)(given, NONE, TOTALS)
    torch.testing.assert_close(eased, 0.5 * StepScores("group")(given, NONE, TOTALS))
    assert not StepScores("group", easing=True)(given, NONE, torch.ones(1, 3)).any()
    found = StepScores("last", weight=2.0)(taken([[9.0, 0.0, 1.0], [0.0, 5.0, 3.0], [7.0, 2.0, NAN]]), NONE, TOTALS)
    torch.testing.assert_close(found, torch.tensor([[-2.0] * 4, [2.0] * 4, [0.0] * 4]))


@pytest.mark.parametrize("whole", [True, False])
def test_a_run_scores_the_steps_of_its_texts(whole):
    """By the characters of a step, in a tiny run; the first ratio is 1."""
    parts = {"spread": {"type": "StepScores", "ends": "1", "whole": whole, "rewards": ["score"], "votes": 1}}
    made = tiny_runs.trainer("tokens", tiny_runs.config("tokens", "grpo", parts, text__max_tokens=12))
    shown = []
    made.scoring.functions["score"] = lambda texts, prompts: shown.extend(texts) or [float(len(text)) for text in texts]
    [part, *_], conditioning, _ = sampling.sample(made, made.prompts[:2])
    [given] = part.transitions
    steps, tokenizer = 0, made.policy.tokenizer
    for ids, mask, segments, values in zip(given.ids, given.old.mask, given.segments, given.values):
        for step in segments[mask].unique().tolist():
            at = mask & ((segments <= step) if whole else (segments == step))
            text = tokenizer.decode(ids[at], skip_special_tokens=True)
            assert text in shown and values[step] == len(text)
            steps += 1
    assert steps > len(given.ids) and given.values.isnan().any()
    tiny_runs.epochs(made, 1)
    assert made.first_ratio.max_log_ratio < 1e-4


REWARDS = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.float64)[..., None]
LENGTHS = torch.tensor([[10, 20, 30, 40], [10, 20, 30, 40], [10, 30, 5, 5]])


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def test_right_ones_earn_less_the_longer_they_are():
    found = shortened(REWARDS[..., 0], REWARDS[..., 0] == 1, LENGTHS, 0.2)
    z = 10 / (math.sqrt(200 / 3) + 1e-6)
    assert found[1].tolist() == pytest.approx([1 - 0.2 * sigmoid(-z), 0.9, 1 - 0.2 * sigmoid(z), 0], abs=1e-10)
    z = 10 / (10 + 1e-6)
    assert found[2].tolist() == pytest.approx([1 - 0.2 * sigmoid(-z), 1 - 0.2 * sigmoid(z), 0, 0], abs=1e-10)
    assert found[0].tolist() == pytest.approx([0.9, 0, 0, 0], abs=1e-10)  # alone with itself


@pytest.mark.parametrize("part, on", [
    (LengthSwitch(top=0.0), []), (LengthSwitch(top=1 / 3), [1]), (LengthSwitch(top=2 / 3), [1, 2]),
    (LengthSwitch(top=1.0), [0, 1, 2]), (LengthSwitch(top=1.0, least=0.5), [1, 2]),
    (LengthSwitch(top=1.0, least=0.75), [1]), (LengthSwitch(), [1])])
def test_groups_that_are_right_often_enough_have_it(part, on):
    found = part(REWARDS, Context(samples=SampleMeasures(lengths=LENGTHS)))
    changed = [i for i in range(3) if not torch.equal(found[i], REWARDS[i])]
    assert changed == on and (found[REWARDS == 0] == 0).all()
    whole = LengthSwitch(top=1.0)(REWARDS, Context(samples=SampleMeasures(lengths=LENGTHS)))
    assert all(torch.equal(found[i], whole[i]) for i in on)


def test_missing_rewards_and_shares():
    both = torch.cat([REWARDS, REWARDS * 3], dim=2)
    both[1, 0, 0] = torch.nan
    found = LengthSwitch(top=1.0)(both, Context(samples=SampleMeasures(lengths=LENGTHS)))
    assert torch.equal(found[..., 1], both[..., 1]) and torch.equal(found.isnan(), both.isnan())
    assert found[1, 1, 0] == pytest.approx(1 - 0.2 * sigmoid(-5 / (5 + 1e-6)), abs=1e-10)  # 20 of 20 and 30
    assert "LengthSwitch: top is 2" in message(LengthSwitch, top=2.0, error=ValueError)
