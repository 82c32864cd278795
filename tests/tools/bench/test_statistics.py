"""Statistics of a bench against closed forms, its choice of a sweep, probes, and charts."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from flowgrpo.tools.bench import collect, page, table
from flowgrpo.tools.bench.collect import (
    Difference,
    best_factors,
    bootstrap_means,
    compare,
    first_crossing,
    frontier,
    holm,
    interval,
    mean_curve,
    mean_path,
    p_value,
    value_at,
)
from flowgrpo.tools.bench.page import LONGEST, bars, shorten
from flowgrpo.tools.bench.probe import epochs_to_measure

ONE, OTHER = np.array([[1.0, 0.25], [0.5, 0.0]]), np.array([[0.0, 0.25], [0.25, 0.5]])


def test_resamples_pair_prompts_and_not_seeds():
    """2 prompts and 2 seeds: 4 draws of prompts, 4 of either method's seeds, 64 in all, equally likely."""
    every, drawn = collect.enumerate_differences(ONE, OTHER), bootstrap_means({"a": ONE, "b": OTHER}, 200_000)
    differences = drawn["a"] - drawn["b"]
    assert len(every) == 64 and every.mean() == pytest.approx(ONE.mean() - OTHER.mean())
    assert differences.mean() == pytest.approx(every.mean(), abs=0.005)
    assert differences.std() == pytest.approx(every.std(), rel=0.01)
    for value, count in zip(*np.unique(every.round(9), return_counts=True)):
        assert np.isclose(differences, value).mean() == pytest.approx(count / 64, abs=0.006)
    # A constant lead on every prompt has no spread over prompts; that over seeds is s^2 / S of each method.
    hard = np.random.default_rng(0).normal(size=50)
    same = np.tile(hard, (3, 1))
    moved = bootstrap_means({"a": same + 0.1, "b": same})
    assert np.ptp(moved["a"] - moved["b"]) == pytest.approx(0, abs=1e-12) and np.std(moved["a"]) > 0.05
    seeds = np.array([[0.0], [1.0], [2.0]])  # s^2 = 1, S = 3
    assert bootstrap_means({"a": np.tile(seeds, (1, 4))}, 100_000)["a"].var() == pytest.approx(1 / 3, rel=0.02)


def test_spreads_and_p_values_by_hand():
    drawn = bootstrap_means({"a": np.array([[0.0, 1.0, 1.0, 0.0]])}, 100_000)["a"]
    assert drawn.mean() == pytest.approx(0.5, abs=0.005) and drawn.var() == pytest.approx(0.25 / 4, rel=0.02)
    assert interval(np.ones((1, 5))) == (1.0, 1.0)
    assert interval(np.array([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]]))[1] == 1.0  # and not above
    assert p_value(np.array([1.0, 2.0, 3.0])) == 2 / 4  # none at or below 0: one resample more on either side
    assert p_value(np.array([-1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])) == 4 / 8
    assert p_value(np.zeros(9)) == 1.0
    # sorted: 0.01 * 4, 0.02 * 3, 0.03 * 2 below the one before, 0.6
    assert holm([0.03, 0.01, 0.6, 0.02]) == pytest.approx([0.06, 0.04, 0.6, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_an_order_is_significant_or_none():
    rng = np.random.default_rng(0)
    hard = rng.random(200)
    low, high = ((hard < share).astype(float)[None].repeat(3, 0) for share in (0.4, 0.6))
    pairs = {(pair.one, pair.other): pair for pair in compare({"low": low, "high": high, "again": low})}
    assert [pairs[pair].order for pair in (("low", "high"), ("low", "again"), ("high", "again"))] == [-1, 0, 1]
    first = pairs["low", "high"]
    assert first.mean == pytest.approx(low.mean() - high.mean()) and first.low < first.mean < first.high < 0
    assert first.holm == pytest.approx(3 * first.p) and pairs["low", "again"].p == 1.0
    assert Difference("a", "b", 0.1, 0.0, 0.2, 0.02, 0.051).order == 0


def test_goals_and_mean_curves_by_hand():
    curve = [(0, 0.4), (60, 0.6), (100, 0.5)]
    assert first_crossing(curve, 0.5) == pytest.approx(30) and first_crossing(curve, 0.6) == pytest.approx(60)
    assert first_crossing(curve, 0.4) == 0 and first_crossing(curve, 0.61) is None
    curves = [[(0, 0.0), (10, 1.0), (20, 1.0)], [(0, 0.0), (20, 0.5)]]
    assert mean_curve(curves) == [(0, 0, 0, 0), (10, pytest.approx(0.625), 0.25, 1.0), (20, 0.75, 0.5, 1.0)]


PUBLISHED, LOW, HIGH = (1.0, 1.0), (1 / 3, 1.0), (3.0, 1.0)


@pytest.fixture
def sweep(tmp_path):
    """Return a function: (factors, seed, accuracy, ...) to finished runs of a method; an accuracy of None is a failed
    one."""
    def made(*given, label="ddpo"):
        for (lr, clip), seed, accuracy in given:
            folder = tmp_path / f"{label}-{lr:.2f}-{clip:.2f}-{seed}"
            folder.mkdir()
            run = SimpleNamespace(entry=SimpleNamespace(label=label), seed=seed, lr=lr, clip=clip, folder=folder,
                                  result=folder / "result.json")
            if accuracy is not None:
                run.result.write_text("{}")
                (folder / "summary.json").write_text(json.dumps({"after": {"scene": accuracy}}))
            yield run
    return made


@pytest.mark.parametrize("given, chosen", [
    ([(PUBLISHED, 3, 0.5), (LOW, 3, 0.4), (HIGH, 3, 0.6)], HIGH),  # before its confirmation
    ([(PUBLISHED, 3, 0.5), (LOW, 3, 0.5), (HIGH, 3, 0.5)], PUBLISHED),  # the first among equals
    ([(PUBLISHED, 3, 0.5), (HIGH, 3, 0.6), (HIGH, 4, 0.5), (HIGH, 5, 0.5)], HIGH),  # a mean of 0.53
    ([(PUBLISHED, 3, 0.5), (HIGH, 3, 0.6), (HIGH, 4, 0.0), (HIGH, 5, 0.7)], PUBLISHED),  # 0.43: one seed fell
    ([(PUBLISHED, 3, 0.5), (LOW, 3, 0.55), (HIGH, 3, 0.6), (HIGH, 4, 0.0)], PUBLISHED),  # the second is not confirmed
    ([(HIGH, 5, 0.9), (HIGH, 4, 0.8), (PUBLISHED, 3, 0.6), (HIGH, 3, 0.5)], PUBLISHED),  # the first seed chooses
    ([(PUBLISHED, 3, None), (LOW, 3, 0.2), (HIGH, 3, 0.1)], LOW),  # nothing to compare with
])
def test_a_winner_is_the_first_seeds_and_stays_if_its_mean_is_above_the_published_setting(sweep, given, chosen):
    assert best_factors([*sweep(*given)], "scene") == {"ddpo": pytest.approx(chosen)}


def test_methods_without_a_finished_run_are_absent(sweep):
    runs = [*sweep((PUBLISHED, 3, None)), *sweep((PUBLISHED, 3, 0.5), label="refl")]
    assert best_factors(runs, "scene") == {"refl": PUBLISHED}


# --- frontier --------------------------------------------------------------------------------------------------------
PROBED = {"diversity": {"base": 2.0, "tuned": 0.5}, "points": [
    {"epoch": 2, "kl": 4.0, "diversity": 1.5}, {"epoch": 3, "kl": 5.0, "diversity": 1.0},  # of an interrupted run
    {"epoch": 4, "kl": 2.25, "diversity": 1.0}, {"epoch": 5, "kl": -0.01, "diversity": 0.5}]}


def test_a_frontier_by_hand():
    assert frontier(0.25, {2: 0.5, 4: 0.75, 5: 0.625}, PROBED) == [
        (0, 0.0, 0.25, 1.0), (1, 2.0, 0.5, 0.75), (2, 1.5, 0.75, 0.5), (3, 0.0, 0.625, 0.25)]
    lost = PROBED | {"points": PROBED["points"][2:]}  # without the first checkpoint
    assert [point[0] for point in frontier(0.25, {2: 0.5, 4: 0.75, 5: 0.625}, lost)] == [0, 2, 3]


@pytest.mark.parametrize("probed", [{}, {"kl": 1.0, "diversity": {"base": 0.0, "tuned": 0.0}}, {
    "diversity": {"base": 1.0, "tuned": 1.0}, "points": [{"epoch": 2, "kl": None, "diversity": 1.0}]}])
def test_a_frontier_without_a_kl_is_the_base(probed):
    assert frontier(0.25, {2: 0.5}, probed) == [(0, 0.0, 0.25, 1.0)]


def test_diversity_and_bands_by_hand():
    points = [{"epoch": 1, "kl": 1.0, "diversity": 0.0}]
    assert frontier(0.5, {1: 0.5}, {"diversity": {"base": 0.0, "tuned": 0.0}, "points": points})[1] == (1, 1, 0.5, 1)
    one = [(0, 0.0, 0.25, 1.0), (2, 1.0, 0.5, 0.75), (3, 9.0, 9.0, 9.0), (4, 2.0, 0.75, 0.5)]
    other = [(0, 0.0, 0.25, 1.0), (2, 3.0, 0.25, 0.25), (4, 1.0, 1.0, 1.0)]
    assert mean_path([one, other], 2) == [(0, .25, .25, .25), (2, .375, .25, .5), (1.5, .875, .75, 1)]
    assert mean_path([one, other], 3) == [(0, 1, 1, 1), (2, .5, .25, .75), (1.5, .75, .5, 1)]


def test_the_page_draws_a_curve_per_method_over_the_distance():
    def method(label, accuracy, path):
        return {"label": label, "accuracy": accuracy, "curve": [(0, .2, .2, .2), (40_000, accuracy, .3, .9)],
                "frontier": path, "diversities": [(x, 1 - x / 10, .5, 1) for x, *_ in path]}
    results = {"unit": "evaluations", "reference": "ddpo", "methods": [
        method("ddpo", 0.5, [(0, .2, .2, .2), (4, .5, .4, .6)]),
        method("refl", 0.7, [(0, .2, .2, .2), (2, .7, .6, .8)]), method("expo", 0.6, [(0, .2, .2, .2)])]}
    curves, frontiers, kept = page._curves(results)
    shown = [section.count("<figure>") for section in (curves, frontiers, kept)]
    assert shown == [2, 1, 1]  # without a KL, expo is in the first alone
    assert "Accuracy against the distance to the base" in frontiers and "square root of the KL" in frontiers
    assert "refl: accuracy from 0.200 to 0.700 after 2 of distance, ddpo at 0.500" in frontiers
    assert "refl: diversity kept from 1.000 to 0.800 after 2 of distance, ddpo at 0.600" in kept
    assert frontiers.count("<circle") == kept.count("<circle") == 4 and "<circle" not in curves
    ends = [float(line.split()[-1].split(",")[0]) for line in re.findall(r'<polyline points="([^"]+)"', frontiers)]
    assert ends == [330.0, 185.0]  # the axis ends at 4, of the reference, and the method's 2 is half-way of 40 to 330
    for result in results["methods"]:
        result["frontier"] = result["diversities"] = [(0, .2, .2, .2)]
    assert len(page._curves(results)) == 1


@pytest.mark.parametrize("spent, shown", [((1000, 1005), False), ((1000, 1200), True)])
def test_methods_that_spent_differently_are_compared_at_the_cost_that_both_reached(spent, shown):
    curves = [[(0, 0.2, 0.2, 0.2), (1000, 0.5, 0.5, 0.5)], [(0, 0.2, 0.2, 0.2), (800, 0.4, 0.4, 0.4), (0, 0.6, 0, 1)]]
    for curve, end in zip(curves, spent):
        curve[-1] = (end, *curve[-1][1:])
    methods = [{"label": label, "accuracy": curve[-1][1], "low": 0.1, "high": 0.9, "lowest": 0.2, "highest": 0.8,
                "gain": 0.3, "curve": curve, "at_cost": value_at(curve, 1000), "adjusted": {}}
               for label, curve in zip(("a", "b"), curves)]
    told = {"methods": methods, "base": 0.2, "cost": 1000, "unit": "tokens", "evaluations": 900, "seeds": 2,
            "trained": {"r": 1.0}, "measured": "r", "measured_prompts": 8, "reference": "a", "errors": {},
            "model": "starter",
            "apart": [["train.lr", "auto", 0.002, "one for all"], ["train.group", None, 4, "fewer"]]}
    heads, rows = table.accuracies(told)
    assert ("at 1,000" in heads) == shown == any("Equal cost is in tokens." in line for line in table.notes(told))
    if shown:
        assert [row[heads.index("at 1,000")] for row in rows] == ["", "0.500", "0.500"]
    assert ("Unlike the recipe `starter`: `train.lr: 0.002` for `auto` (one for all); `train.group: 4` for the default "
            "(fewer).") in table.notes(told)


@pytest.mark.parametrize("every, expected", [(0, [30]), (10, [10, 20, 30]), (20, [20, 30]), (7, [30])])
def test_the_last_checkpoint_is_probed_and_those_that_were_measured(every, expected):
    assert epochs_to_measure([10, 20, 25, 30], every) == expected


def test_labels_and_dots_of_a_chart():
    names = ["mix_grpo+grpo_guard", "mix_grpo+grpo_guard+texforce"]
    assert [shorten(name) for name in names] == ["mix_grpo+…po_guard", "mix_grpo+…texforce"]
    assert all(len(shorten(name)) == LONGEST for name in names) and shorten("awm") == "awm"
    drawn = bars([(name, 0.5, "0.500") for name in names], "accuracy")
    assert all(f">{shorten(name)}<title>{name}</title>" in drawn for name in names)
    drawn = bars([("a", 0.25, ""), ("b", 0.5, "")], "accuracy", dots=[0.5, None])
    [dot] = re.findall(r'<circle class="dot" cx="([0-9.]+)" cy="15"', drawn)
    left, widths = re.findall(r'<rect x="(\d+)"', drawn)[0], re.findall(r'width="([0-9.]+)" height="16"', drawn)
    assert float(dot) == pytest.approx(float(left) + 2 * float(widths[0]), abs=0.2)  # both rounded to 0.1
    assert float(dot) == pytest.approx(float(left) + float(widths[1]), abs=0.1)
    [dot] = re.findall(r'cx="([0-9.]+)"', bars([("a", 0.25, "")], "accuracy", dots=[1.0]))
    assert float(dot) < 340 - 58
