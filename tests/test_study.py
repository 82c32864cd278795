"""Study of parts: its statistics, its table, its prompts, and the page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "scripts"))

import study_page  # noqa: E402
import study_parts  # noqa: E402
import study_rows  # noqa: E402
import study_statistics  # noqa: E402


def scores(rate: float, seed: int, prompts: int = 200) -> np.ndarray:
    return (np.random.default_rng(seed).random((3, prompts)) < rate).astype(float)


def test_a_large_difference_is_found_and_none_is_not():
    better, same = study_statistics.compared(scores(0.3, 0), scores(0.7, 1)), scores(0.5, 2)
    assert better["difference"] > 0.3 and better["low"] > 0.2 and better["p"] < 0.01
    none = study_statistics.compared(same, same)
    assert none["difference"] == 0 and none["p"] > 0.9 and none["low"] < 0 < none["high"]
    assert better["with"] == pytest.approx(scores(0.7, 1).mean(1).tolist())


def test_welchs_test_is_that_of_the_means_of_seeds():
    without, having = (np.repeat([[value] for value in side], 4, 1) for side in ([0.1, 0.2, 0.3], [0.5, 0.7, 0.9]))
    # t = 0.5 / sqrt(0.01 / 3 + 0.04 / 3) = 3.873 with 2.94 degrees of freedom
    assert study_statistics.compared(without, having)["welch"] == pytest.approx(0.0315, abs=5e-4)
    assert study_statistics.compared(without, without)["welch"] == 1
    assert study_statistics.compared(np.zeros((3, 4)), np.ones((3, 4)))["welch"] == 0


@pytest.mark.parametrize("seeds, p, quantity, verdict", [
    ([0.3, 0.4, 0.5], 0.01, "accuracy", 1), ([0.1, 0.1, 0.1], 0.01, "accuracy", -1),
    ([0.3, 0.4, 0.5], 0.06, "accuracy", 0), ([0.3, 0.1, 0.9], 0.01, "accuracy", 0),
    ([0.1, 0.1, 0.1], 0.01, "kl", 1), ([0.3, 0.4, 0.5], 0.01, "kl", -1)])
def test_a_verdict_needs_significance_and_every_seed(seeds, p, quantity, verdict):
    result = {"without": [0.2, 0.2, 0.2], "with": seeds, "p": p, "quantity": quantity}
    assert study_statistics.verdict(result) == verdict


def test_p_values_are_corrected_for_the_number_of_rows():
    row = {"without": [0.1], "with": [0.2], "quantity": "accuracy"}
    told = study_statistics.judged([row | {"p": 0.02}, row | {"p": 0.04}, row | {"p": 0.01}])
    assert [each["holm"] for each in told] == pytest.approx([0.04, 0.04, 0.03])
    assert [(each["better"], each["verdict"]) for each in told] == [(1, 1)] * 3


def test_the_table_shows_seeds_difference_and_verdict():
    told = {"name": "Hints", "pool": "five numbers", "quantity": "accuracy", "without": [0.2, 0.4],
            "with": [0.5, 0.7], "difference": 0.3, "low": 0.2, "high": 0.4, "better": 2, "p": 0.0002, "holm": 0.012,
            "welch": 0.2, "verdict": 1, "evaluations": 1.25}
    assert study_statistics.table([told])[-1] == (
        "| `Hints` | five numbers | accuracy, higher | 0.300 (0.200 to 0.400) | 0.600 (0.500 to 0.700) | "
        "+0.300 (+0.200 to +0.400) | 2/2 | < 0.001 | 0.012 | 0.200 | helps | x1.25 |")
    told |= {"name": "SampledKL", "quantity": "kl", "accuracy": [0.5, 0.25]}
    assert study_statistics.accuracies([told])[-1] == "| `SampledKL` | 0.500 | 0.250 |"
    assert study_statistics.accuracies([told | {"quantity": "accuracy"}]) == []


def test_rows_change_what_they_name_and_nothing_else():
    assert len({(row.name, row.pool) for row in study_rows.ROWS}) == len(study_rows.ROWS)
    for row in study_rows.ROWS:
        assert row.options != row.without and row.quantity in study_statistics.HIGHER
        assert (row.without == study_rows.BASE) == (row.base is None)
        assert row.options["train.lr"] == study_rows.BASE["train.lr"]


def test_options_of_a_row_are_over_its_base():
    row = study_rows.Row("part", "", "accuracy", method="relift", parts={"data": {"batch": 2}},
                         reward={"step_match": 1.0}, more={"train.epochs": 3},
                         base={"train.group": 2, "parts": {"advantage": {"scale": "none"}}})
    assert row.without["train.group"] == 2 and row.without["method"] == "grpo"
    assert row.without["parts"] == {"kl": {"weight": 0.0}, "advantage": {"scale": "none"}}
    changed = {key for key, value in row.options.items() if row.without.get(key) != value}
    assert changed == {"method", "parts", "reward", "train.epochs"} and row.options["method"] == "grpo+relift"
    assert row.options["parts"] == row.without["parts"] | {"data": {"batch": 2}}


def test_sides_of_the_sums_of_five_are_disjoint_and_only_the_last_is_held_out():
    sides = study_parts.fives()
    assert {side: len(problems) for side, problems in sides.items()} == {
        side: count for side, (_, count) in study_parts.SIDES.items()}
    assert len({problem for problems in sides.values() for problem in problems}) == sum(map(len, sides.values()))
    assert {problem.held_out for problem in sides["train"] + sides["validation"]} == {False}
    assert {problem.held_out for problem in sides["held_out"]} == {True}


def test_a_hint_is_the_first_half_of_the_partial_sums():
    problem = study_parts.Problem((10, 20, 30, 40, 50))
    assert study_parts.line(problem) == {"prompt": "10+20+30+40+50=", "metadata": {
        "answer": "150", "solution": "30;60;100;150", "task": "5 numbers", "hints": ["30;60;"]}}


def test_a_fourth_of_the_prompts_is_not_mastered():
    lines = [{"prompt": f"{number}+10=", "metadata": {"answer": str(number + 10)}} for number in range(1600)]
    mixed = study_parts.mostly_known(lines)
    sources = [each["metadata"]["source"] for each in mixed]
    assert (sources.count("mastered"), sources.count("recipe")) == (study_parts.MASTERED, study_parts.MASTERED // 3)
    assert "source" not in lines[0]["metadata"] and "hints" not in mixed[0]["metadata"]


def test_the_page_is_current():
    results = json.loads(study_page.DATA.read_text(encoding="utf-8"))
    assert study_page.PAGE.read_text(encoding="utf-8") == study_page.page(results), "run scripts/study_page.py"


def test_every_row_of_the_study_has_what_was_seen():
    results = json.loads(study_page.DATA.read_text(encoding="utf-8"))
    seen = {(row.name, study_rows.POOLS[row.pool]): row.seen for row in study_rows.ROWS}
    assert results["side"] == "held_out" and all(seen[row["name"], row["pool"]] for row in results["rows"])
