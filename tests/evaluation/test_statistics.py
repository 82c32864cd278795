"""Intervals, win rates, drift, pass@k and held-out scores on numbers worked by hand."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from flowgrpo import rewards
from flowgrpo.cli.root import print_table
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation import findings, held_out, statistics
from flowgrpo.evaluation.findings import majority, pass_at_k, powers, tries, verdicts
from flowgrpo.evaluation.held_out import compare_rewards
from flowgrpo.evaluation.measured import Measured
from flowgrpo.evaluation.statistics import STUDENT, WILSON, Interval, cells, change, drift, interval, method_of, wins
from scripts.measure import false_sentences
from tests.helpers.refusals import message

NAN = math.nan


@pytest.mark.parametrize("hits, count", [(0, 10), (3, 10), (10, 10), (41, 200)])
def test_a_share_has_wilsons_interval(hits, count):
    z, p = 1.959963984540054, hits / count
    middle, half = (p + z * z / (2 * count)), z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    found = interval(np.array([1.0] * hits + [0.0] * (count - hits))[:, None])
    assert (found.mean, found.method, found.prompts) == (pytest.approx(p, abs=1e-12), WILSON, count)
    assert found.low == pytest.approx(max((middle - half) / (1 + z * z / count), 0), abs=1e-10)
    assert found.high == pytest.approx(min((middle + half) / (1 + z * z / count), 1), abs=1e-10)


def test_a_ratio_of_paired_means_has_fiellers_interval():
    first, second = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 1.0, 2.0, 4.0])
    found = statistics.ratio(first, second)
    assert found.mean == pytest.approx(0.8) and found.prompts == 4  # 2 over 2.5
    for end in (found.low, found.high):  # at its ends a t-test of second - r first is at 5 %
        assert stats.ttest_1samp(second - end * first, 0).pvalue == pytest.approx(0.05)
    # By hand: t = 3.182446, k = t^2 / (4 * 6.25) = .405119, xx = 5/3, xy = 5/3, yy = 2; 1 - k xx = .324802.
    reach = math.sqrt(0.405119 * (2 - 1.6 * 5 / 3 + 0.64 * 5 / 3 - 0.405119 * (10 / 3 - 25 / 9)))
    assert found.low == pytest.approx((0.8 - 0.405119 * 5 / 3 - reach) / 0.324802, rel=1e-4)
    twice = statistics.ratio(first, 2 * first)
    assert twice.low == pytest.approx(twice.mean) == pytest.approx(twice.high) == pytest.approx(2)
    assert statistics.ratio(np.array([math.nan, *first, 9]), np.array([1, *second, math.nan])) == found


@pytest.mark.parametrize("first", [[1.0, -1.0, 1.0, -0.5], [0.0, 0.0, 0.0], [1.0]])
def test_a_ratio_to_what_may_be_nothing_has_no_interval(first):
    found = statistics.ratio(np.array(first), np.ones(len(first)))
    assert math.isnan(found.low) and math.isnan(found.high)


@pytest.mark.parametrize("values, adjusted", [
    ([], []), ([0.04], [0.04]), ([0.5, 0.9], [1.0, 1.0]),
    ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),  # .005 * 4, .01 * 3, .03 * 2, and .04 not below .06
    ([0.03, 0.01, 0.6, 0.02], [0.06, 0.04, 0.6, 0.06]),  # .01 * 4, .02 * 3, .03 * 2, .6
    ([0.02, 0.02, 0.02], [0.06, 0.06, 0.06])])
def test_holms_p_values_by_hand(values, adjusted):
    assert statistics.holm(values) == pytest.approx(adjusted)


def test_a_mean_has_students_interval_widened_for_skewness():
    """Hall's polynomial t + c t^2 + c^2 t^3 / 3 + c / 2 with c = skewness / (3 sqrt(n)) is a quantile of Student's t at
    each end, for a skewness of 0 and of the sample's with 2/3 of sqrt(6 / n) less and more; the widest of them counts.
    """
    for values in ([-1.0, 1.0] * 10, [0.0] * 15 + [1.0, 2.0, 4.0, 7.0, 9.0], [1.0, 2.0]):
        count, mean, error = len(values), np.mean(values), np.std(values, ddof=1) / math.sqrt(len(values))
        skewness = np.mean((values - mean) ** 3) / np.std(values, ddof=1) ** 3
        roots: dict[int, list[float]] = {1: [], -1: []}
        for gamma in (0.0, *(skewness + side * 2 / 3 * math.sqrt(6 / count) for side in (-1, 1))):
            c = gamma / (3 * math.sqrt(count))
            for side, found in roots.items():
                of = np.roots([c * c / 3, c, 1, c / 2 - side * stats.t.isf(0.025, count - 1)])
                found.append(float(of[np.abs(of.imag) < 1e-9].real[0]))
        found = change(np.zeros((count, 1)), np.array(values)[:, None])
        assert found.low == pytest.approx(mean - max(roots[1]) * error, rel=1e-6)
        assert found.high == pytest.approx(mean - min(roots[-1]) * error, rel=1e-6)


@pytest.mark.parametrize("before, after", [
    (np.zeros(24), np.arange(24) ** 2 / 100), (np.array([0.0, 1.0] * 20), np.array([1.0, 1.0, 0.0, 1.0] * 10)),
    (np.array([1.0] * 20 + [0.0] * 5), np.array([0.0] * 14 + [1.0] * 11))])
def test_p_is_what_is_left_of_the_widest_interval_that_excludes_no_change(before, after, monkeypatch):
    found = change(before[:, None], after[:, None])
    assert (found.p < 0.05) == (not found.low <= 0 <= found.high)
    monkeypatch.setattr(statistics, "Z", stats.norm.isf(found.p / 2))
    monkeypatch.setattr(statistics, "CONFIDENCE", 1 - found.p)
    same = change(before[:, None], after[:, None])
    assert min(abs(same.low), abs(same.high)) == pytest.approx(0, abs=1e-7) and same.p == found.p
    assert "p" in found.as_json() and "p" not in interval(after[:, None]).as_json()
    constant = np.full((5, 1), 0.3)
    assert change(constant, constant).p == 1 and change(constant, constant + 0.1).p == 0


def test_of_several_changes_those_count_that_holm_leaves():
    """Of 0.01, 0.02 and 0.04 all: 3 x 0.01, 2 x 0.02 and 0.04 are below 0.05. Of 0.02, 0.03 and 0.04 none: 3 x 0.02 is
    not."""
    def ways(*ps: float, prompts: int = 20) -> list[int]:
        changes = {str(i): Interval((-1) ** i, -2.0, 2.0, STUDENT, prompts, p) for i, p in enumerate(ps)}
        return [*statistics.directions(changes).values()]

    assert ways(0.01, 0.02, 0.04) == [1, -1, 1] and ways(0.02, 0.03, 0.04) == [0, 0, 0] and ways(0.04) == [1]
    assert ways(0.001, 0.6, 0.02, 0.03) == [1, 0, 0, 0]
    assert ways(0.001, prompts=19) == [0] and statistics.directions({}) == {}
    few = Interval(1.0, 0.5, 1.5, STUDENT, 3, 0.04)  # is not counted
    assert statistics.directions({"few": few, "a": Interval(1.0, 0.5, 1.5, STUDENT, 20, 0.04)}) == {"few": 0, "a": 1}
    held = {name: replace(moved(-0.1), p=0.02) for name in "bcd"}
    assert drift({"a": replace(UP, p=0.04)} | held, ["a"]) == [
        "a rose by 0.200 (95 %: +0.190 to +0.210); no held-out reward (b, c, d) fell by more than chance"]


def most(runs: int) -> int:
    """Runs of which one in twenty says something false: so many or fewer, in 999 of 1,000 cases."""
    return int(stats.binom.ppf(0.999, runs, 0.05))


@pytest.mark.parametrize("kind", false_sentences.NOISES)
@pytest.mark.parametrize("persistent", [False, True])
def test_the_best_of_twenty_evaluations_is_not_said_to_have_risen(kind, persistent):
    rng = np.random.default_rng(4)
    found = [false_sentences.rises(rng, kind, 20, 20, persistent) for _ in range(100)]
    new, same = (sum(each[rule] for each in found) for rule in ("new prompts", "same"))
    assert new <= most(100) and new < same
    assert persistent or sum(each["new seeds"] for each in found) <= most(100)


@pytest.mark.parametrize("kind, prompts", [("normal", 20), ("skewed", 24), ("verdicts", 20)])
def test_ten_rewards_that_changed_nothing_are_not_said_to_have_fallen(kind, prompts):
    rng = np.random.default_rng(5)
    each, said = np.array([false_sentences.hacked(rng, kind, prompts, 10) for _ in range(100)]).sum(0)
    assert said <= most(100) < each


def test_images_that_are_as_the_bases_are_not_said_to_be_alike():
    generator = torch.Generator().manual_seed(6)
    said, means = zip(*(false_sentences.warned(generator, 8) for _ in range(60)))
    assert sum(map(bool, said)) <= 2 < sum(means)


def test_dependent_samples_count_as_far_as_they_differ():
    scores = np.random.default_rng(1).normal(2.0, 0.5, (400, 1))
    found, half = interval(scores), 1.96 * scores.std() / 20
    assert found.method == STUDENT and found.mean == pytest.approx(scores.mean(), abs=1e-12)
    assert found.low == pytest.approx(found.mean - half, abs=0.1 * half)
    assert found.high == pytest.approx(found.mean + half, abs=0.1 * half)
    assert found == interval(scores)
    values = np.random.default_rng(2).normal(size=(50, 1))
    one, eight = interval(values), interval(np.repeat(values, 8, 1))
    assert (eight.low, eight.high) == (pytest.approx(one.low, abs=1e-10), pytest.approx(one.high, abs=1e-10))
    # Four prompts with four samples each: as 4 where a prompt's samples agree, as 16 where nothing sets prompts apart.
    agreed = np.repeat([[1.0], [1.0], [0.0], [0.0]], 4, 1)
    same, one = interval(agreed), interval(agreed[:, :1])
    assert (same.low, same.high) == (pytest.approx(one.low), pytest.approx(one.high)) and same.method == WILSON
    mixed, sixteen = interval(np.tile([1.0, 0.0, 1.0, 0.0], (4, 1))), interval(np.tile([[1.0], [0.0]], (8, 1)))
    assert (mixed.low, mixed.high) == (pytest.approx(sixteen.low), pytest.approx(sixteen.high))
    assert mixed.prompts == 4 and mixed.low > same.low


def test_methods_and_scores_that_apply():
    found = interval(np.array([[1.0, NAN], [NAN, NAN], [0.0, 3.0]]))
    assert (found.mean, found.prompts) == (1.25, 2)
    alone = interval(np.array([[NAN], [2.5]]))
    assert (alone.mean, alone.prompts) == (2.5, 1) and math.isnan(alone.low) and math.isnan(alone.high)
    none = interval(np.array([[NAN]]))
    assert none.prompts == 0 and math.isnan(none.mean)
    # A category where every score happens to be 1 has the interval of the others.
    graded, strict = np.array([[1.0], [1.0], [0.4]]), np.array([[1.0, 0.0], [1.0, NAN], [0.0, 0.0]])
    assert (method_of(graded), method_of(strict), method_of(strict, graded)) == (STUDENT, WILSON, STUDENT)
    assert method_of(np.array([[NAN]])) == STUDENT
    part = interval(graded[:2], method_of(graded))
    assert (part.mean, part.low, part.high, part.method) == (1.0, 1.0, 1.0, STUDENT)
    alone = interval(graded[:1], method_of(graded))
    assert math.isnan(alone.low) and math.isnan(alone.high) and alone.method == STUDENT


@pytest.mark.parametrize("both, one, other, neither, expected", [
    (43, 0, 3, 0, (-0.1750, 0.0229)), (36, 12, 2, 0, (0.0569, 0.3404)), (2, 0, 0, 2, (-0.3500, 0.3500))])
def test_the_change_of_a_share_has_newcombes_interval(both, one, other, neither, expected):
    """Worked by hand from Wilson's limits and phi; no paired count may be negative."""
    before = np.array([1.0] * (both + other) + [0.0] * (one + neither))[:, None]
    after = np.array([1.0] * both + [0.0] * other + [1.0] * one + [0.0] * neither)[:, None]
    found = change(before, after)
    assert found.method == WILSON and found.mean == pytest.approx((one - other) / len(before))
    assert (found.low, found.high) == (pytest.approx(expected[0], abs=1e-4), pytest.approx(expected[1], abs=1e-4))
    rate = statistics.win_rate(before, after)
    assert rate.mean == pytest.approx(wins(before, after).mean())
    assert (rate.low, rate.high) == (pytest.approx(0.5 + found.low / 2), pytest.approx(0.5 + found.high / 2))


def test_changes_wins_and_categories():
    before, after = np.zeros((10, 1)), np.array([1.0] + [0.0] * 9)[:, None]
    found = change(before, after)
    assert found.mean == pytest.approx(0.1) and found.low < 0 < found.high
    assert interval(after - before, STUDENT).low == 0  # within the scores; a change may lie beyond
    graded = change(before + 0.25, after + 0.25)
    assert (graded.mean, graded.method) == (pytest.approx(0.1), STUDENT) and graded.low < 0 < graded.high
    before, after = np.array([[1.0], [NAN], [0.0]]), np.array([[1.0], [1.0], [1.0]])
    assert (change(before, after).mean, change(before, after).prompts) == (0.5, 2)
    assert math.isnan(change(np.array([[NAN]]), np.array([[1.0]])).mean)
    parts = [Interval(0.5, 0.4, 0.7, STUDENT, 10), Interval(0.7, 0.4, 0.9, STUDENT, 5),
             Interval(NAN, NAN, NAN, STUDENT, 0)]
    found = statistics.mean_of(parts)
    assert (found.mean, found.prompts) == (pytest.approx(0.6), 15)
    assert found.low == pytest.approx(0.6 - math.sqrt(0.1**2 + 0.3**2) / 2)
    assert found.high == pytest.approx(0.6 + math.sqrt(0.2**2 + 0.2**2) / 2)
    base, tuned = np.array([[1, 2, NAN], [5, 5, 1.0]]), np.array([[2, 1, 3], [5, NAN, 0.0]])
    np.testing.assert_array_equal(wins(base, tuned), [[1, 0, NAN], [0.5, NAN, 0]])


def moved(mean: float, half: float = 0.01) -> Interval:
    return Interval(mean, mean - half, mean + half, STUDENT, 100)


UP, DOWN, SAME = moved(0.2), moved(-0.1), moved(0.001)


@pytest.mark.parametrize("changes, trained, expected", [
    ({"a": UP, "b": DOWN}, ["a"], ["possible reward hacking: a rose by 0.200 (95 %: +0.190 to +0.210), which was "
                                   "trained on, while b fell by 0.100 (95 %: -0.110 to -0.090), held out"]),
    ({"a": UP, "b": SAME}, ["a"], ["a rose by 0.200 (95 %: +0.190 to +0.210); no held-out reward (b) fell by more than "
                                   "chance"]),
    ({"a": UP, "b": UP}, ["a"], ["a rose by 0.200 (95 %: +0.190 to +0.210); no held-out reward (b) fell by more than "
                                 "chance"]),
    ({"a": SAME, "b": DOWN}, ["a"], ["no trained reward rose by more than chance; b fell by 0.100 (95 %: -0.110 to "
                                     "-0.090)"]),
    ({"a": DOWN, "b": SAME}, ["a"], ["no trained reward rose by more than chance"]),
    ({"a": UP}, ["a"], ["no held-out reward was measured, so that hacking could not be seen: add one to --rewards"]),
    ({"a": UP, "b": DOWN}, None, ["a rose by 0.200 (95 %: +0.190 to +0.210), b fell by 0.100 (95 %: -0.110 to -0.090) "
                                  "(which reward was trained on is not known, so that nothing is said of hacking)"])])
def test_drift_is_said_in_words(changes, trained, expected):
    assert drift(changes, trained) == expected


def test_nothing_is_said_on_few_prompts_and_alike_images_are_told():
    few = Interval(0.2, 0.1, 0.3, STUDENT, 19)
    said = "nothing is said of drift in {}: it has scores on 19 prompts, and at least 20 are needed"
    assert drift({"b": few}, ["a"], DOWN) == [said.format("b")]
    assert drift({"a": UP, "b": few}, ["a"]) == [
        said.format("b"), "no held-out reward was measured, so that hacking could not be seen: add one to --rewards"]
    assert drift({"a": UP, "b": SAME}, ["a"], DOWN)[1] == (
        "the images of a prompt became more alike: diversity fell by 0.100 (95 %: -0.110 to -0.090)")
    assert len(drift({"a": UP, "b": SAME}, ["a"], UP)) == 1


@pytest.mark.parametrize("samples, right, k, expected", [
    (4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 1, 3, 0.75), (4, 1, 4, 1.0),  # one right one is among k of 4 with k / 4
    (5, 2, 2, 0.7),  # 1 - C(3,2) / C(5,2) = 1 - 3/10
    (10, 3, 5, 11 / 12),  # 1 - C(7,5) / C(10,5) = 1 - 21/252
    (4, 0, 4, 0.0), (4, 4, 1, 1.0), (200, 1, 100, 0.5)])
def test_pass_at_k_by_hand(samples, right, k, expected):
    assert pass_at_k(samples, right, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_mean_over_all_choices():
    for samples, right in itertools.product((1, 3, 6), range(7)):
        given = [i < right for i in range(samples)]
        for k in range(1, samples + 1):
            choices = [any(chosen) for chosen in itertools.combinations(given, k)]
            assert pass_at_k(samples, sum(given), k) == pytest.approx(np.mean(choices), abs=1e-12)


@pytest.mark.parametrize("given", [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_what_cannot_be_asked_is_told(given):
    assert "expected k from 1 and right from 0" in message(pass_at_k, *given, error=ValueError)


@pytest.mark.parametrize("answers, scores, expected", [
    (["7", "7", "3"], [1, 1, 0], 1.0), (["7", "3", "3"], [1, 0, 0], 0.0),
    (["7", "3"], [1, 0], 0.5),  # as often
    (["7", None, None, "3", "7"], [1, 0, 0, 0, 1], 1.0), ([None, None], [0, 0], 0.0), (["7", "7"], [1, NAN], NAN)])
def test_the_majority_by_hand(answers, scores, expected):
    assert majority(answers, scores) == pytest.approx(expected, nan_ok=True)


def test_what_is_told_of_rewards_and_not_of_penalties():
    """Of a table [3,4] with a prompt that the reward does not apply to; of a score between 0 and 1 nothing is told."""
    right = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [NAN, NAN, NAN, NAN]])
    answers = [["a", "b", "b", "c"], ["a", "a", "b", "c"], ["a"] * 4]
    found = tries({"right": right, "graded": np.where(np.isnan(right), 0.5, right)}, {"right": answers})
    assert list(found) == ["right"] and list(found["right"]) == ["pass@1", "pass@2", "pass@4", "maj@4"]
    means = {what: told["mean"] for what, told in found["right"].items()}
    assert means == pytest.approx({"pass@1": (1 / 4 + 2 / 4) / 2, "pass@2": (1 / 2 + 5 / 6) / 2, "pass@4": 1.0,
                                   "maj@4": 0.5})  # b leads in the first row, a in the second
    assert all(told["prompts"] == 2 for told in found["right"].values())
    assert tries({"right": right[:, :1]}, {}) == {} and powers(6) == [1, 2, 4, 6] and powers(8) == [1, 2, 4, 8]
    # repetition and overlong are 0 at best, sharpness has no bound; of a plain function nothing is known.
    given = {name: rewards.find(name) for name in ("repetition", "numeric_match", "exact_match", "sharpness")}
    given["overlong"] = rewards.find("overlong", {"longest": 8, "buffer": 4})
    assert verdicts(given | {"own": len}) == ["numeric_match", "exact_match", "own"]


TASKS = [1, ["a", "b"], "[/red]x", "[red]y", ":cat:", {"of": 2}]


def measured(*scores: float, tasks=TASKS) -> Measured:
    """A prompt of each task, with these scores of the reward `[b]`."""
    return Measured([Prompt(f"prompt {i}", metadata={"task": task}) for i, task in enumerate(tasks)],
                    {"[b]": list(scores)}, torch.empty(0))


def summary(before: Measured, after: Measured) -> dict:
    return {"evaluation": {"prompts": len(before.prompts), "of": "images"}, "before": before.mean(),
            "after": after.mean(), "compared": compare_rewards(before, after, 1), "total_seconds": 24.3,
            "resumed": False, "seconds": 1.0, "denoiser_evaluations": 2, "unit": "evaluations",
            "rollout_evaluations_per_sample": 1.0,
            "rollout_evaluations_saved_by_sharing": 0, "max_first_log_ratio": None, "kept": "kept [bold]",
            "updates": 5, "skipped_updates": 2}


def test_tasks_may_be_anything_that_json_has(capsys):
    before, after = measured(*[0.25] * 6), measured(*[0.5] * 6)
    assert before.by_task("[b]") == dict.fromkeys(["1", "['a', 'b']", "[/red]x", "[red]y", ":cat:", "{'of': 2}"], 0.25)
    held_out.print_report(summary(before, after), "weights: runs/c[red]", Path("runs/c[red]"))
    out = capsys.readouterr().out
    rows = [line.split("│") for line in out.splitlines() if "+0.250" in line]
    assert [row[1].strip() for row in rows] == ["1", "['a', 'b']", "[/red]x", "[red]y", ":cat:", "{'of': 2}",
                                                "all prompts"]
    assert "24 s in all, with loading and evaluation, 1 s of training; 2 evaluations" in out
    assert "[b] on 6 held-out images" in out and "kept [bold]\nweights: runs/c[red]\n" in out
    assert "before and after: runs/c[red]/before_after.png; report: runs/c[red]/report.html" in out
    assert "2 updates were skipped, because the gradient was not finite, and 5 were made\n" in out


@pytest.mark.parametrize("name", ["[/red]x", "[red]y", ":cat:"])
def test_names_in_other_tables_are_text_too(name, capsys):
    print_table([name, "b", name], [[name, "1", name]])
    assert capsys.readouterr().out.count(name) == 4
    print_table(["what", "name", "GB"], [["model", "long" * 100, "1"]])  # wider than the page: folded, not cut
    assert capsys.readouterr().out.count("long") >= 98
    entry = {"mean": 0.5, "low": 0.4, "high": 0.6, "prompts": 3, "method": "exact"}
    findings.show({"suite": {"name": name, "prompts": 3}, "samples": 1, "compared": {}, "unit": "picture",
                   "arms": {name: {name: {name: entry, findings.ALL: entry}}}, "category_means": {name: {name: entry}},
                   "failed": {}, "tries": {}, "diversity": {}, "drift": []})
    title, *rest = capsys.readouterr().out.splitlines()
    assert f"{name} on {name} (3 prompts, 1 per prompt)" in title and "\n".join(rest).count(name) == 4


def test_scores_that_do_not_apply_are_a_dash_in_the_table_and_null_in_the_file(tmp_path, capsys):
    before, after = measured(math.nan, math.nan, 0.5, tasks="aab"), measured(math.nan, math.nan, math.nan, tasks="aab")
    held_out.print_report(summary(before, after), "", tmp_path)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()
            if line.startswith("│")]
    assert rows == [["a", "-", "-", "-"], ["b", "0.500", "-", "-"], ["all prompts", "0.500", "-", "-"]]
    held_out.write_before(tmp_path, before, {})
    told = json.loads((tmp_path / "before.json").read_text(), parse_constant=pytest.fail)
    assert told["scores"] == {"[b]": [None, None, 0.5]}
    assert Measured(before.prompts, told["scores"], torch.empty(0)).mean() == before.mean() == {"[b]": 0.5}


def test_all_rows_of_a_table_have_intervals_of_one_kind(capsys):
    """A task whose graded scores are all 1 has Student's interval as the others; of one prompt there is none."""
    tasks = "aab"
    before, after = measured(0.25, 0.75, 1.0, tasks=tasks), measured(1.0, 1.0, 1.0, tasks=tasks)
    rows = compare_rewards(before, after, 1)["[b]"]
    assert {entry["method"] for row in rows.values() for entry in row.values()} == {"Student's t over prompts"}
    assert cells(rows) == [["a", "0.500 [0.250, 0.750]", "1.000 [1.000, 1.000]", "+0.500 [-2.677, +3.677]"],
                           ["b", "1.000", "1.000", "0.000"], *cells(rows)[2:]]
    strict = compare_rewards(measured(0, 1, 1, tasks=tasks), measured(1, 1, 1, tasks=tasks), 1)["[b]"]
    assert {entry["method"] for row in strict.values() for entry in row.values()} == {"Wilson"}
    assert cells(strict)[1][:2] == ["b", "1.000 [0.207, 1.000]"]


def test_small_changes_and_resumed_runs(tmp_path, capsys):
    before, after = measured(0.0071, 0.0073, tasks="ab"), measured(0.0064, 0.0062, tasks="ab")
    assert cells(compare_rewards(before, after, 1)["[b]"])[0] == ["a", "0.00710", "0.00640", "-0.00070"]
    told = {"total_seconds": 12.0, "seconds": 40.0, "resumed": True}
    held_out.print_report(summary(before, after) | told, "", tmp_path)
    assert "12 s since it was resumed, 40 s of training of all epochs; " in capsys.readouterr().out


@pytest.mark.parametrize("values, changes, expected", [
    ([], [], 3), ([0.0], [0.0], 3), ([0.5, 1.0], [0.5], 3), ([0.0071], [], 5), ([0.0000002], [], 6), ([21.3], [], 1),
    ([21.3], [0.0123], 3), ([0.946, 0.945], [0.0009], 5), ([math.nan, None, 0.02], [None], 4)])
def test_decimals_of_a_column(values, changes, expected):
    assert statistics.decimals(values, changes) == expected
