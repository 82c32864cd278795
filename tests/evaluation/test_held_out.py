"""What is told of held-out scores: per task, whatever a person calls it."""

import json
import math
from pathlib import Path

import pytest
import torch

from flowgrpo.cli.root import print_table
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation import findings, held_out
from flowgrpo.evaluation.held_out import compare_rewards
from flowgrpo.evaluation.measured import Measured
from flowgrpo.evaluation.statistics import cells, decimals

TASKS = [1, ["a", "b"], "[/red]x", "[red]y", ":cat:", {"of": 2}]


def measured(*scores: float, tasks=TASKS) -> Measured:
    """A prompt of each task, with these scores of the reward `[b]`."""
    return Measured([Prompt(f"prompt {i}", metadata={"task": task}) for i, task in enumerate(tasks)],
                    {"[b]": list(scores)}, torch.empty(0))


def summary(before: Measured, after: Measured) -> dict:
    return {"evaluation": {"prompts": len(before.prompts), "of": "images"}, "before": before.mean(),
            "after": after.mean(), "compared": compare_rewards(before, after, 1), "total_seconds": 24.3,
            "resumed": False, "seconds": 1.0, "denoiser_evaluations": 2, "unit": "evaluations",
            "rollout_evaluations_per_picture": 1.0,
            "rollout_evaluations_saved_by_sharing": 0, "max_first_log_ratio": None, "kept": "kept [bold]",
            "updates": 5, "skipped_updates": 2}


def test_tasks_may_be_anything_that_json_has(capsys):
    before, after = measured(*[0.25] * 6), measured(*[0.5] * 6)
    assert before.by_task("[b]") == dict.fromkeys(
        ["1", "['a', 'b']", "[/red]x", "[red]y", ":cat:", "{'of': 2}"], 0.25)
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
    """A task whose graded scores are all 1 has a bootstrap's interval as the others; of one prompt there is none."""
    tasks = "aab"
    before, after = measured(0.25, 0.75, 1.0, tasks=tasks), measured(1.0, 1.0, 1.0, tasks=tasks)
    rows = compare_rewards(before, after, 1)["[b]"]
    assert {entry["method"] for row in rows.values() for entry in row.values()} == {"bootstrap over prompts"}
    assert cells(rows) == [["a", "0.500 [0.250, 0.750]", "1.000 [1.000, 1.000]", "+0.500 [+0.250, +0.750]"],
                           ["b", "1.000", "1.000", "0.000"], *cells(rows)[2:]]
    strict = compare_rewards(measured(0, 1, 1, tasks=tasks), measured(1, 1, 1, tasks=tasks), 1)["[b]"]
    assert {entry["method"] for row in strict.values() for entry in row.values()} == {"Wilson"}
    assert cells(strict)[1][:2] == ["b", "1.000 [0.207, 1.000]"]


def test_small_rewards_have_the_digits_of_their_change():
    rows = compare_rewards(measured(0.0071, 0.0073, tasks="ab"), measured(0.0064, 0.0062, tasks="ab"), 1)["[b]"]
    assert cells(rows)[0] == ["a", "0.00710", "0.00640", "-0.00070"]


@pytest.mark.parametrize("values, changes, expected", [
    ([], [], 3), ([0.0], [0.0], 3), ([0.5, 1.0], [0.5], 3), ([0.0071], [], 5), ([0.0000002], [], 6), ([21.3], [], 1),
    ([21.3], [0.0123], 3), ([0.946, 0.945], [0.0009], 5), ([math.nan, None, 0.02], [None], 4)])
def test_decimals_of_a_column(values, changes, expected):
    assert decimals(values, changes) == expected


def test_a_resumed_run_says_so():
    told = {"total_seconds": 12.0, "seconds": 40.0, "resumed": True}
    assert held_out.describe_time(told) == "12 s since it was resumed, 40 s of training of all epochs"
