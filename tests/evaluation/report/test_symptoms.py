"""Outcome and symptoms of a run, from its lines of metrics."""

import pytest

from flowgrpo.config import validate
from flowgrpo.evaluation.report import verdict
from flowgrpo.evaluation.report.symptoms import CLIPPED, COLLAPSED, EQUAL, FLAT, START, of_run
from flowgrpo.evaluation.report.verdict import outcome, sentences, untrained_lines
from tests.helpers.refusals import message

REWARDS = {"reward": {"a": 1.0, "b": 1.0}}
NONE = {"mean": None, "std": 0.0, "failed": 8, "zero_variance_groups": None}
HALF = {"mean": 0.5, "std": 0.0, "failed": 0, "zero_variance_groups": 1.0}
GROUPS = {"mean": 0.4, "std": 0.1, "failed": 0, "zero_variance_groups": 1.0}
TOP = {"mean": 1.0, "std": 0.0, "failed": 0, "zero_variance_groups": 1.0}
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
    (["a"], [line(1, a=VARIES), line(2, a=HALF)], ""),
    # Solved, from the start or from some epoch on; of the other reward the best score is not known.
    (["top"], [line(1, 0, top=TOP)],
     "Nothing was trained in 1 epoch: top gave every sample 1, its best score: take harder prompts. These are the"),
    (["top"], [line(1, top=TOP)], "The rewards taught nothing: top gave every sample 1, its best score: take harder"),
    (["top"], [line(1, top=VARIES), line(2, 0, top=TOP)],
     "1 of 2 epochs trained nothing (epoch 2): top gave every sample 1, its best score: take harder prompts."),
    (["top"], [line(1, 0, top=TOP | {"mean": 0.0})], "Nothing was trained in 1 epoch: top gave every sample 0. These"),
    (["a"], [line(1, 0, a=TOP)], "Nothing was trained in 1 epoch: a gave every sample 1. These")])
def test_what_was_not_trained_is_told(rewards, lines, said):
    config = validate({"reward": dict.fromkeys(rewards, 1.0)})
    [*told] = outcome(config, lines, ranges={"top": [0, 1]}).sentences
    assert len(told) == bool(said) and "".join(told).startswith(said)
    shown = [each["text"] for each in sentences(config, lines, [], {}, True, ranges={"top": [0, 1]})]
    nothing = said.startswith("Nothing")
    assert f"starter {'was to be' if nothing else 'was'} trained on" in shown[nothing or said.startswith("The rewards")]
    assert not said or told[0] in shown[:2]


def test_causes_of_last_errors_earlier_lines_and_weight_0():
    config = validate({"reward": {"a": 1.0, "b": 1.0}})
    [told] = outcome(config, [line(1, 0, a=NONE, b=GROUPS)], {"a": "reward 'a': down", "b": "once"}).sentences
    assert told.startswith("Nothing was trained in 1 epoch: a gave no score (its last error: reward 'a': down) and b "
                           "gave all samples of a prompt the same score. ")
    config = validate({"reward": {"a": 0.0, "b": 1.0}})
    assert outcome(config, [line(1, 0, a=VARIES, b=HALF)]).sentences[0].startswith(
        "Nothing was trained in 1 epoch: b gave every sample 0.5.")
    known = [{key: value for key, value in line(1, a=VARIES).items() if key != "trained_updates"} | {"grad_norm": norm}
             for norm in (0.0, 0.1, None)]
    assert [outcome(validate({"reward": "a"}), [each]).nothing for each in known] == [True, False, False]
    assert untrained_lines({}) == [] and untrained_lines({"trained": {"said": ["so"]}}) == ["so"]
    assert "summary.json: trained is 5, expected a list under `said`" in message(untrained_lines, {"trained": 5})


@pytest.mark.parametrize("lines, goal", [
    ([line(1, a=NONE, b=VARIES), line(2, a=NONE, b=VARIES)], "b"),
    ([line(1, a=NONE, b=VARIES), line(2, a=VARIES, b=VARIES)], "a and b"),
    ([line(1, 0, a=NONE, b=GROUPS)], "a and b")])
def test_a_run_was_not_trained_on_a_reward_that_never_gave_a_score(lines, goal):
    config = validate({"reward": {"a": 1.0, "b": 1.0}})
    shown = " ".join(each["text"] for each in sentences(config, lines, [], {}, True))
    assert f" trained on {goal} with " in shown


NOISE = [0.01, -0.01]


def lines(rewards, zero=0.2, clipped=0.1, ratio=1e-5, name="a"):
    return [{"epoch": i + 1, "evaluations": 1, "seconds": 1.0, f"reward/{name}/mean": value,
             f"reward/{name}/zero_variance_groups": zero, "clip_fraction": clipped, "log_ratio_max": ratio}
            for i, value in enumerate(rewards)]


def names(config, metrics, clip=1e-4):
    return [*of_run(validate(config), metrics, clip)]


def noisy(slope, count=FLAT):
    return [0.5 + slope * i + NOISE[i % 2] for i in range(count)]


@pytest.mark.parametrize("slope, weight, flat", [
    (0.0, 1.0, True), (0.01, 1.0, False), (-0.01, 1.0, True), (-0.01, -1.0, False), (0.0001, 1.0, True)])
def test_a_reward_that_does_not_improve(slope, weight, flat):
    assert names({"reward": {"a": weight}}, lines(noisy(slope))) == ["flat reward"] * flat
    assert names({"reward": {"a": weight}}, lines(noisy(slope, FLAT - 1))) == []
    assert names({"reward": {"a": weight}}, lines([9.0, *noisy(slope)])) == ["flat reward"] * flat


def test_a_reward_that_is_centred_in_its_groups_has_no_level_that_could_rise():
    """The same means are a symptom where they are not rounding, or where no deviation is known."""
    centred = [1e-8 * value for value in noisy(0.0)]
    assert names({"reward": {"a": 1.0}}, [line | {"reward/a/std": 1.0} for line in lines(centred)]) == []
    assert names({"reward": {"a": 1.0}}, [line | {"reward/a/std": 1e-8} for line in lines(centred)]) == ["flat reward"]
    assert names({"reward": {"a": 1.0}}, lines(centred)) == ["flat reward"]


def test_rewards_and_gradients_of_symptoms():
    """A run whose reward rose by .5 in its first epochs, and has been level for the last FLAT ones."""
    early = [value - 0.5 for value in noisy(0.0, START)]
    assert names({"reward": {"a": 1.0}}, lines([*early, *noisy(0.0, 2 * FLAT)])) == []
    assert names({"reward": {"a": -1.0}}, lines([*early, *noisy(0.0, 2 * FLAT)])) == ["flat reward"]
    assert names({"reward": {"a": 1.0}}, lines(noisy(0.0, 3 * FLAT))) == ["flat reward"]
    both = [one | other for one, other in zip(lines(noisy(0.0)), lines(noisy(0.01), name="b"))]
    assert names({"reward": {"a": 1.0, "b": 1.0}}, both) == []
    assert names({"reward": {"a": 1.0}}, lines([None] * FLAT)) == []  # no sample had a score
    metrics = lines(noisy(0.01, 2))
    assert names({"reward": {"a": 1.0}}, [metrics[0], metrics[1] | {"weights/change": 2.9}]) == []
    [(name, large)] = of_run(validate({"reward": {"a": 1.0}}), [metrics[0] | {"weights/change": 5.4}], None).items()
    assert name == "large weights" and "changed by 5.4 times" in large and "0.0003" in large
    [small] = of_run(validate({"reward": {"a": 1.0}}), [metrics[0] | {"adam_eps_share": 2 / 3}], None).values()
    assert "about 5.0e-09, and AdamW's eps 1e-08, so that a step is 0.33 of train.lr: set train.eps to 5e-11" in small


ENDED = {"clip_fraction": 0.0, "log_ratio_max": 0.0, "grad_norm": 1e-9, "diversity": 1e-4, "adam_eps_share": 0.9}


@pytest.mark.parametrize("mean, weight, zero, known, found", [
    (1.0, 1.0, 1.0, [0, 1], ["equal rewards"]), (0.96, 1.0, 0.9, [0, 1], ["equal rewards"]),
    (0.96, 1.0, 0.5, [0, 1], []), (0.0, -1.0, 0.5, [0, None], []), (1.0, 1.0, 0.5, [None, 1], []),
    *((mean, weight, 0.5, known, ["flat reward", "clip fraction", "collapse", "small gradient"]) for
      mean, weight, known in ((0.9, 1.0, [0, 1]), (0.0, 1.0, [0, 1]), (1.0, -1.0, [0, 1]), (1.0, 1.0, None),
                              (0.99, 1.0, [None, 1])))])
def test_a_run_whose_prompts_are_solved_has_no_symptom_but_that(mean, weight, zero, known, found):
    """Rewards stay, the policy does too, and gradients vanish: at the ceiling that is the end, elsewhere a fault."""
    config = validate({"reward": {"a": weight}, "train": {"updates": 2, "prompts": 4}})
    metrics = [{"epoch": 1, "grad_norm": 5.0}] + [one | ENDED for one in lines([mean] * (FLAT - 1), zero=zero)]
    metrics[0] |= {"reward/a/mean": mean}
    told = of_run(config, metrics, 1e-4, {"a": known})
    assert [*told] == found
    assert found != ["equal rewards"] or told["equal rewards"].endswith("have the best score, so take harder prompts")


def test_labels_of_a_file_have_no_reward_to_improve(tmp_path):
    config = {"reward": {"a": 1.0}, "preferences": str(tmp_path / "pairs.jsonl"), "method": "diffusion_dpo"}
    assert names(config, lines(noisy(0.0))) == [] and names(config | {"labels": "rewards"}, lines(noisy(0.0)))


@pytest.mark.parametrize("share, count, said", [(0.95, EQUAL, True), (0.95, EQUAL - 1, False), (0.8, EQUAL, False)])
def test_groups_of_equal_rewards(share, count, said):
    found = of_run(validate({"reward": {"a": 1.0}}), lines(noisy(0.01, count), zero=share), 1e-4)
    assert [text.partition(" and teach")[0] for text in found.values()] == \
        ["95 % of the groups of 5 epochs have equal rewards"] * said


@pytest.mark.parametrize("fraction, ratio, updates, clip, said", [
    (1.0, 1e-2, 1, 1e-4, True), (0.0, 1e-6, 2, 1e-4, True), (0.0, 1e-6, 1, 1e-4, False), (0.0, 5e-5, 2, 1e-4, False),
    (0.0, 1e-6, 2, None, False), (0.5, 1e-4, 2, 1e-4, False)])
def test_a_clip_that_never_acts_or_always(fraction, ratio, updates, clip, said):
    config = {"reward": {"a": 1.0}, "train": {"updates": updates, "prompts": 4}}
    metrics = lines(noisy(0.01, CLIPPED), clipped=fraction, ratio=ratio)
    assert names(config, metrics, clip) == ["clip fraction"] * said and names(config, metrics[1:], clip) == []


def test_the_report_says_the_same():
    config, metrics = validate({"reward": {"a": 1.0}}), lines(noisy(0.0), clipped=1.0)
    told = verdict.sentences(config, metrics, [], {"first_ratio": {"clip": 1e-4}}, False)
    flat, clipped = of_run(config, metrics, 1e-4).values()
    assert told[1:] == [{"tone": "warn", "text": f"Flat reward: {flat}."},
                        {"tone": "warn", "text": f"Clip fraction: {clipped}."}]
    assert "(a 0.500 to 0.500): look at train.lr" in flat and "range (1.0e-04)" in clipped


@pytest.mark.parametrize("apart, norms, kl, said", [
    (1e-5, [1e-6] * COLLAPSED, 3.5, "norm 1.0e-06 after 1.0e-06, diversity within a group 1.0e-05, KL to the reference "
                                    "3.5e+00"),
    (0.1, [1e-2, *[1e-6] * COLLAPSED], None, "norm 1.0e-06 after 1.0e-02, diversity within a group 1.0e-01, KL to the "
                                             "reference not measured"),
    (1e-5, [1e-6] * (COLLAPSED - 1), 3.5, None), (0.1, [1e-6] * COLLAPSED, 3.5, None),
    (0.1, [0.0] * 9, 3.5, None), (1e-5, [1e-2] * COLLAPSED, 3.5, None)])
def test_a_collapse_is_told_by_diversity_gradient_and_kl(apart, norms, kl, said):
    metrics = [line | {"diversity": apart, "grad_norm": norm, "kl": kl}
               for line, norm in zip(lines(noisy(0.01, len(norms))), norms)]
    found = of_run(validate({"reward": {"a": 1.0}}), metrics, 1e-4)
    assert [*found] == ["collapse"] * (said is not None)
    assert said is None or said in found["collapse"]


@pytest.mark.parametrize("counts, precision, said", [
    ([0, 0], "fp32", None), ([0, 1], "fp32", "1 of the updates so far was skipped, because the gradient was not"),
    ([1, 3], "fp16", "3 of the updates so far were skipped")])
def test_skipped_updates(counts, precision, said):
    metrics = [line | {"skipped_updates": count} for line, count in zip(lines(noisy(0.01, 2)), counts)]
    found = of_run(validate({"reward": {"a": 1.0}, "precision": precision}), metrics, 1e-4).values()
    assert [text.startswith(said) for text in found] == [True] * (said is not None)
    assert all(("fp16" in text) == (precision == "fp16") for text in found)
