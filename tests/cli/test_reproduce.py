"""`flowgrpo reproduce`: its commands, costs and table; folders of evaluations without --output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowgrpo.cli import main, reproduce
from flowgrpo.cli.evaluate import folder_of

COSTS = json.loads((Path(__file__).parents[2] / "scripts" / "paper_costs.json").read_text(encoding="utf-8"))


def test_results_are_the_recipes_of_the_papers_with_their_costs():
    assert {name.replace("/", "_") for name in reproduce.RESULTS} == COSTS.keys()
    for name, result in reproduce.RESULTS.items():
        found = COSTS[name.replace("/", "_")]
        assert (result.epochs, result.seconds, result.peak) == (found["epochs"], found["seconds"], found["peak"])
        assert (found["gpu"], found["processes"]) == (reproduce.GPU, reproduce.PROCESSES)


def test_a_dry_run_prints_the_commands_and_the_cost(capsys):
    assert main(["reproduce", "flow_grpo/geneval", "--dry-run", "--train.epochs=2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "flowgrpo prepare --yes papers/flow_grpo_geneval --train.epochs=2",
        "accelerate launch --multi_gpu --num_processes 8 -m flowgrpo train papers/flow_grpo_geneval --resume=auto "
        "--train.epochs=2",
        "flowgrpo eval runs/flow_grpo_geneval --suite geneval --rewards geneval --base",
        "training, computed: 62.7 GiB on each of 8 A100, 247 s an epoch, 69 h for 1,000 epochs, 548 GPU-hours"]


def test_an_unknown_result_names_the_others(capsys):
    assert main(["reproduce", "flow_grpo/genevil"]) == 2
    assert "no published result 'flow_grpo/genevil': did you mean 'flow_grpo/geneval'?" in capsys.readouterr().err


def test_the_papers_number_stands_beside_ours(capsys):
    def arm(mean):
        return {"geneval": {"all prompts": {"mean": 0, "low": 0, "high": 0}}}, {"geneval": {
            "mean": mean, "low": mean - 0.02, "high": mean + 0.02}}

    (base, base_tasks), (tuned, tuned_tasks) = arm(0.61), arm(0.93)
    reproduce.show("flow_grpo/geneval", reproduce.RESULTS["flow_grpo/geneval"], {
        "arms": {"base": base, "tuned": tuned}, "category_means": {"base": base_tasks, "tuned": tuned_tasks},
        "suite": {"prompts": 553}})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["base", "0.63", "0.61", "0.59", "to", "0.63"] in lines
    assert ["tuned", "0.95", "0.93", "0.91", "to", "0.95"] in lines
    assert "flow_grpo/geneval: 2505.05470, table 2, with KL; 553 prompts".split() in lines


@pytest.mark.parametrize("source, suite, folder", [
    ("runs/mine", "geneval", "runs/mine/eval/geneval"), ("owner/model", "geneval", "runs/eval/owner_model/geneval"),
    ("runs/mine", "hub:owner/set?split=test", "runs/mine/eval/hub_owner_set_split_test")])
def test_an_evaluation_has_a_folder_without_output(tmp_path, monkeypatch, source, suite, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("model: starter\n")
    assert folder_of(source, suite) == Path(folder)
