"""Statistics of a bench against closed forms, its choice of a sweep, probes, and charts."""

import csv
import io
import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from flowgrpo.tools.bench import collect, page, table
from flowgrpo.tools.bench.collect import best_factors, estimate, first_crossing, frontier, mean_curve
from flowgrpo.tools.bench.page import LONGEST, bars, shorten
from flowgrpo.tools.bench.probe import epochs_to_measure

ONE, OTHER = np.array([[3.0, 1.0], [5.0, 3.0]]), np.array([[1.0, 2.0], [0.0, 0.0]])


def test_seeds_and_prompts_are_crossed_factors():
    """The table of ONE has rows 2 and 4, columns 4 and 2, and no rest: a variance of the mean of 2/2 + 2/2 = 2, of
    degrees 2^2 / (1/1 + 1/1) = 2, of which the quantile of .975 is 4.30265."""
    found = estimate(ONE)
    assert found.mean == 3.0 and found.high - 3.0 == pytest.approx(4.30265 * 2**0.5, rel=1e-5)
    assert 3.0 - found.low == pytest.approx(found.high - 3.0)
    # Means of seeds 2 and 4, 1.5 and 0: variances 1 and .5625. Differences of prompts 3.5 and 1: 1.5625. The rest of
    # OTHER is -+.25 in each place, its mean square .25, its part of the variance .0625. So 3.0625 in all, of degrees
    # 3.0625^2 / (1 + .5625^2 + 1.5625^2).
    found, freedom = estimate(ONE, OTHER), 3.0625**2 / (1 + 0.5625**2 + 1.5625**2)
    assert found.mean == 2.25 and found.p == pytest.approx(2 * stats.t.sf(2.25 / 1.75, freedom))
    assert found.low == pytest.approx(2.25 - stats.t.ppf(0.975, freedom) * 1.75)
    turned = estimate(OTHER, ONE)
    assert (turned.mean, turned.low, turned.high) == pytest.approx((-2.25, -found.high, -found.low))


def test_prompts_that_are_hard_for_both_say_nothing_of_the_difference():
    """Equal on each prompt but for a shift of each seed: Welch's test of the seeds is left."""
    hard = np.random.default_rng(0).normal(size=50)
    one, other = (np.add.outer(np.array(shifts), hard) for shifts in ([0.1, 0.2, 0.4], [0.0, 0.3, 0.1]))
    expected = stats.ttest_ind(one.mean(1), other.mean(1), equal_var=False)
    found = estimate(one, other)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))


@pytest.mark.parametrize("one, other, expected", [
    (np.ones((1, 9)), None, (1.0, np.nan, np.nan, np.nan)),  # one seed, or one prompt
    (np.ones((3, 9)), np.zeros((1, 9)), (1.0, np.nan, np.nan, np.nan)),
    (np.ones((3, 1)), np.zeros((3, 1)), (1.0, np.nan, np.nan, np.nan)),
    (np.ones((3, 9)), np.zeros((3, 9)), (1.0, 1.0, 1.0, 0.0)),
    (np.ones((3, 9)), np.ones((2, 9)), (0.0, 0.0, 0.0, 1.0))])
def test_what_has_no_spread_or_no_replication(one, other, expected):
    found = estimate(one, other)
    assert (found.mean, found.low, found.high, found.p) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("seeds, of_seeds", [(2, 0.05), (3, 0.05), (3, 0.0)])
def test_methods_without_a_difference_are_seldom_told_apart(seeds, of_seeds):
    """400 benches of two methods that are the same: at most 5 % below .05, and three standard errors of that."""
    rng, false = np.random.default_rng(0), 0
    for _ in range(400):
        hard = rng.normal(0.5, 0.25, 60)
        one, other = (hard + rng.normal(0, 0.05, 60) + rng.normal(0, of_seeds, (seeds, 1))
                      + rng.normal(0, 0.2, (seeds, 60)) for _ in range(2))
        false += estimate(one, other).p < 0.05
    assert false / 400 <= 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5


def test_all_are_compared_with_the_reference_and_corrected_together():
    rng = np.random.default_rng(0)
    scores = {name: (rng.random((3, 200)) < share).astype(float) for name, share in
              (("a", 0.4), ("b", 0.6), ("c", 0.4))} | {"d": np.ones((1, 200))}
    found = collect.compare(scores, "a")
    assert found.keys() == {"b", "c", "d"}
    assert found["b"]["holm"] == pytest.approx(2 * found["b"]["p"]) and found["b"]["holm"] < 0.05
    assert found["c"]["holm"] == found["c"]["p"] > found["b"]["p"] and np.isnan(found["d"]["holm"])  # d has one seed
    assert found["b"]["mean"] == pytest.approx(scores["b"].mean() - scores["a"].mean())


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


def test_a_frontier_its_diversity_and_its_bands_by_hand():
    assert frontier(0.25, {2: 0.5, 4: 0.75, 5: 0.625}, PROBED) == [
        (0, 0.0, 0.25, 1.0), (1, 2.0, 0.5, 0.75), (2, 1.5, 0.75, 0.5), (3, 0.0, 0.625, 0.25)]
    lost = PROBED | {"points": PROBED["points"][2:]}  # without the first checkpoint
    assert [point[0] for point in frontier(0.25, {2: 0.5, 4: 0.75, 5: 0.625}, lost)] == [0, 2, 3]
    points = [{"epoch": 1, "kl": 1.0, "diversity": 0.0}]
    assert frontier(0.5, {1: 0.5}, {"diversity": {"base": 0.0, "tuned": 0.0}, "points": points})[1] == (1, 1, 0.5, 1)
    one = [(0, 0.0, 0.25, 1.0), (2, 1.0, 0.5, 0.75), (3, 9.0, 9.0, 9.0), (4, 2.0, 0.75, 0.5)]
    other = [(0, 0.0, 0.25, 1.0), (2, 3.0, 0.25, 0.25), (4, 1.0, 1.0, 1.0)]
    assert collect.mean_path([one, other], 2) == [(0, .25, .25, .25), (2, .375, .25, .5), (1.5, .875, .75, 1)]
    assert collect.mean_path([one, other], 3) == [(0, 1, 1, 1), (2, .5, .25, .75), (1.5, .75, .5, 1)]


@pytest.mark.parametrize("probed", [{}, {"kl": 1.0, "diversity": {"base": 0.0, "tuned": 0.0}}, {
    "diversity": {"base": 1.0, "tuned": 1.0}, "points": [{"epoch": 2, "kl": None, "diversity": 1.0}]}])
def test_a_frontier_without_a_kl_is_the_base(probed):
    assert frontier(0.25, {2: 0.5}, probed) == [(0, 0.0, 0.25, 1.0)]


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


def told(spent=(1000, 1005), **changes) -> dict[str, Any]:
    """Return the results of two methods, a the reference, with two seeds each."""
    curves = [[(0, 0.2, 0.2, 0.2), (1000, 0.5, 0.5, 0.5)], [(0, 0.2, 0.2, 0.2), (800, 0.4, 0.4, 0.4), (0, 0.6, 0, 1)]]
    for curve, end in zip(curves, spent):
        curve[-1] = (end, *curve[-1][1:])
    moved = {"mean": -0.1, "low": -0.25, "high": 0.05, "p": 0.0004, "holm": 0.0008}
    software = {"flowgrpo": "0.1.0", "torch": "2.8.0", "commit": "0123abc"}
    methods = [{"label": label, "accuracy": curve[-1][1], "low": 0.1, "high": 0.9, "lowest": 0.2, "highest": 0.8,
                "gain": 0.3, "curve": curve, "at_cost": collect.value_at(curve, 1000), "adjusted": {}, "seeds": 2,
                "runs": [{"seed": seed, "evaluations": curve[-1][0]} for seed in (0, 1)], "software": software,
                "evaluations": curve[-1][0], "difference": None if label == "a" else moved}
               for label, curve in zip(("a", "b_1&2"), curves)]
    return {"methods": methods, "base": 0.2, "cost": 1000, "unit": "tokens", "evaluations": 1200, "seeds": 2,
            "trained": {"r": 1.0}, "measured": "r", "measured_prompts": 8, "reference": "a", "errors": {},
            "model": "starter", "budget": "at most", "test": "a test",
            "apart": [["train.lr", "auto", 0.002, "one for all"], ["train.group", None, 4, "fewer"]]} | changes


@pytest.mark.parametrize("spent, shown", [((1000, 1005), False), ((1000, 1200), True)])
def test_methods_that_spent_differently_are_compared_at_the_cost_that_both_reached(spent, shown):
    results = told(spent)
    heads, rows = table.accuracies(results)
    assert ("at 1,000" in heads) == shown == any("Equal cost is in tokens." in line for line in table.notes(results))
    if shown:
        assert [row[heads.index("at 1,000")] for row in rows] == ["", "0.500", "0.500"]
    assert ("Unlike the recipe `starter`: `train.lr: 0.002` for `auto` (one for all); `train.group: 4` for the default "
            "(fewer).") in table.notes(results)


def test_the_papers_table_as_markdown_latex_and_csv():
    results = told()
    results["methods"][1]["tuned"] = {"accuracy": 0.75, "low": 0.5, "high": 1.0, "lr": 3.0, "clip": 1.0,
                                      "difference": None, "runs": [{"seed": 0, "evaluations": 900}]}
    heads, rows = table.accuracies(results)
    assert heads == ["method", "seeds", "accuracy, 95 %", "difference, 95 %", "p (Holm)", "spent",
                     "best of sweep, 95 %", "its lr, clip", "its difference, 95 %", "its p (Holm)"]
    assert rows == [["base", "", "0.200"] + [""] * 7,
                    ["b_1&2", "2", "0.600 [0.100, 0.900]", "-0.100 [-0.250, +0.050]", "< 0.001", "1,005",
                     "0.750 [0.500, 1.000]", "x3, x1", "-", "-"],
                    ["a", "2", "0.500 [0.100, 0.900]", "reference", "", "1,000", "-", "-", "-", "-"]]
    tex = table.latex(results)
    assert r"b\_1\&2 & 2 & 0.600 [0.100, 0.900] & $-$0.100 [$-$0.250, +0.050] & \textless{} 0.001 & 1,005 &" in tex
    assert tex.count(r" \\") == 4 and r"\begin{tabular}{lrrrrrrrrr}" in tex
    assert "Made with flowgrpo 0.1.0, torch 2.8.0, commit 0123abc." in tex
    assert tex.index(r"\toprule") < tex.index("accuracy, 95 \\%") < tex.index(r"\midrule") < tex.index(r"\bottomrule")
    lines = [*csv.DictReader(io.StringIO(table.as_csv(results)))]
    assert [(line["method"], line["settings"], line["seeds"], line["spent"]) for line in lines] == [
        ("b_1&2", "published", "0 1", "1005"), ("b_1&2", "sweep", "0", "900"), ("a", "published", "0 1", "1000")]
    assert [lines[0][key] for key in ("difference", "difference_low", "difference_high", "p", "p_holm", "commit",
                                      "torch")] == ["-0.1", "-0.25", "0.05", "0.0004", "0.0008", "0123abc", "2.8.0"]
    assert lines[2]["difference"] == lines[2]["p"] == "" and lines[0]["budget"] == "1200"


@pytest.mark.parametrize("text, shown", [
    ("a_b & 5 % #1 $x", r"a\_b \& 5 \% \#1 \$x"),
    ("{x}~^\\", r"\{x\}\textasciitilde{}\textasciicircum{}\textbackslash{}"),
    ("p < 0.001\n", r"p \textless{} 0.001"), ("-0.5 to -1, mix-2", r"$-$0.5 to $-$1, mix-2")])
def test_latex_shows_what_was_meant(text, shown):
    assert table.escaped(text) == shown


def test_what_was_spent_above_the_budget_and_a_single_seed_are_told():
    notes = table.notes(told((1000, 1300), seeds=1))
    assert any("`b_1&2` spent up to 1,300, above the budget" in line for line in notes)
    assert any(line.startswith("One seed:") for line in notes)
    old = {key: value for key, value in told().items() if key != "budget"}  # of an earlier version
    assert "(the epoch that reaches them is finished)" in table.notes(old)[0]


def test_versions_of_runs_are_named_once():
    machines = [{"flowgrpo": "1", "torch": "2", "commit": "a"}, {"flowgrpo": "1", "torch": "3"}]
    assert collect.software(machines) == {"flowgrpo": "1", "torch": "2 and 3", "commit": "a and no clone",
                                          } and collect.software(machines[1:]) == {"flowgrpo": "1", "torch": "3"}


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
