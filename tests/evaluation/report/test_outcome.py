"""Outcome of a run: what it did not train, and why, on its lines of metrics."""

import pytest

from flowgrpo.config import validate
from flowgrpo.errors import UserError
from flowgrpo.evaluation.report.verdict import outcome, sentences, untrained

REWARDS = {"reward": {"a": 1.0, "b": 1.0}}
NONE = {"mean": None, "std": 0.0, "failed": 8, "zero_variance_groups": None}
HALF = {"mean": 0.5, "std": 0.0, "failed": 0, "zero_variance_groups": 1.0}
GROUPS = {"mean": 0.4, "std": 0.1, "failed": 0, "zero_variance_groups": 1.0}
VARIES = {"mean": 0.4, "std": 0.1, "failed": 0, "zero_variance_groups": 0.0}


def line(epoch, updates=1, skipped=0, change=0.01, **rewards):
    return {"epoch": epoch, "evaluations": 1, "seconds": 1.0, "trained_updates": updates, "skipped_updates": skipped,
            "weights/change": change} | {f"reward/{name}/{key}": value for name, values in rewards.items()
                                         for key, value in values.items()}


@pytest.mark.parametrize("rewards, lines, said", [
    (["a"], [line(1, 0, a=HALF), line(2, 0, a=HALF)], "Nothing was trained in 2 epochs: a gave every sample 0.5."),
    (["a"], [line(1, 0, a=NONE)], "Nothing was trained in 1 epoch: a gave no score."),
    (["a"], [line(1, 0, a=NONE | {"failed": 0})], "Nothing was trained in 1 epoch: a applied to no sample."),
    (["a"], [line(1, 0, a=GROUPS)],
     "Nothing was trained in 1 epoch: a gave all samples of a prompt the same score."),
    (["a", "b"], [line(1, 0, a=NONE, b=GROUPS), line(2, 0, a=NONE, b=GROUPS)],
     "Nothing was trained in 2 epochs: a gave no score and b gave all samples of a prompt the same score."),
    (["a"], [line(1, 0, 1, a=VARIES), line(2, 0, 2, a=VARIES)],
     "Nothing was trained in 2 epochs: the gradient was not finite, so that every update was skipped"),
    (["a"], [line(1, change=1e-12, a=VARIES)],
     "Nothing was trained in 1 epoch: the weights changed by 1.0e-12 of their size, which no sample shows: train.lr is "
     "too small (0.0003)."),
    (["a"], [line(1, a=HALF)], "The rewards taught nothing: a gave every sample 0.5."),
    (["a"], [line(1, a=VARIES), line(2, 0, a=NONE), line(3, 0, a=NONE)],
     "2 of 3 epochs trained nothing (epochs 2 to 3): a gave no score."),
    (["a", "b"], [line(1, a=NONE, b=VARIES), line(2, a=VARIES, b=VARIES), line(3, a=NONE, b=VARIES)],
     "a gave no score in 2 epochs (epochs 1 and 3)."),
    (["a"], [line(1, a=VARIES), line(2, a=HALF)], "")])
def test_what_was_not_trained_is_told(rewards, lines, said):
    config = validate({"reward": dict.fromkeys(rewards, 1.0)})
    [*told] = outcome(config, lines).sentences
    assert len(told) == bool(said) and "".join(told).startswith(said)
    shown = [each["text"] for each in sentences(config, lines, [], {}, True)]
    nothing = said.startswith("Nothing")
    assert f"starter {'was to be' if nothing else 'was'} aligned to" in shown[nothing or said.startswith("The rewards")]
    assert not said or told[0] in shown[:2]


@pytest.mark.parametrize("lines, goal", [
    ([line(1, a=NONE, b=VARIES), line(2, a=NONE, b=VARIES)], "b"),
    ([line(1, a=NONE, b=VARIES), line(2, a=VARIES, b=VARIES)], "a and b"),
    ([line(1, 0, a=NONE, b=GROUPS)], "a and b")])
def test_a_run_was_not_aligned_to_a_reward_that_never_gave_a_score(lines, goal):
    config = validate({"reward": {"a": 1.0, "b": 1.0}})
    shown = " ".join(each["text"] for each in sentences(config, lines, [], {}, True))
    assert f" aligned to {goal} with " in shown


def test_a_reward_of_weight_0_is_no_cause():
    config = validate({"reward": {"a": 0.0, "b": 1.0}})
    assert outcome(config, [line(1, 0, a=VARIES, b=HALF)]).sentences[0].startswith(
        "Nothing was trained in 1 epoch: b gave every sample 0.5.")


def test_lines_of_earlier_versions_say_it_by_the_gradient():
    known = [{key: value for key, value in line(1, a=VARIES).items() if key != "trained_updates"} | {"grad_norm": norm}
             for norm in (0.0, 0.1, None)]
    assert [outcome(validate({"reward": "a"}), [each]).nothing for each in known] == [True, False, False]


def test_a_summary_of_another_form_is_refused():
    assert untrained({}) == [] and untrained({"trained": {"said": ["so"]}}) == ["so"]
    with pytest.raises(UserError, match=r"summary.json: trained is 5, expected a list under `said`"):
        untrained({"trained": 5})
