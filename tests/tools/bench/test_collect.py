"""Choice of a sweep, from the files of its runs."""

import json
import re
from types import SimpleNamespace

import pytest

from flowgrpo.tools.bench import page, table
from flowgrpo.tools.bench.collect import best_factors, frontier, mean_path, value_at

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


def test_diversity_of_a_base_without_any_is_kept():
    points = [{"epoch": 1, "kl": 1.0, "diversity": 0.0}]
    assert frontier(0.5, {1: 0.5}, {"diversity": {"base": 0.0, "tuned": 0.0}, "points": points})[1] == (1, 1, 0.5, 1)


def test_the_band_of_several_seeds_by_hand():
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
