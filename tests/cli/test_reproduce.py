"""`flowgrpo reproduce`: its commands, costs and table; folders of evaluations without --output."""

import json
from pathlib import Path

import pytest

from flowgrpo.cli import main, reproduce
from flowgrpo.cli.evaluate import folder_of

COSTS = json.loads((Path(__file__).parents[2] / "scripts" / "docs" / "paper_costs.json").read_text(encoding="utf-8"))


def test_results_have_costs_and_unknown_ones_name_the_others(capsys):
    assert {name.replace("/", "_") for name in reproduce.RESULTS} == COSTS.keys()
    for name, result in reproduce.RESULTS.items():
        found = COSTS[name.replace("/", "_")]
        assert (result.epochs, result.seconds, result.peak) == (found["epochs"], found["seconds"], found["peak"])
        assert (found["gpu"], found["processes"]) == (reproduce.GPU, reproduce.PROCESSES)
    assert main(["reproduce", "flow_grpo/genevil"]) == 2
    assert "no published result 'flow_grpo/genevil': did you mean 'flow_grpo/geneval'?" in capsys.readouterr().err


def test_a_dry_run_prints_the_commands_and_the_cost(capsys):
    assert main(["reproduce", "flow_grpo/geneval", "--dry-run", "--train.epochs=2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "flowgrpo prepare --yes papers/flow_grpo_geneval --train.epochs=2",
        "accelerate launch --multi_gpu --num_processes 8 -m flowgrpo train papers/flow_grpo_geneval --resume=auto "
        "--train.epochs=2",
        "flowgrpo eval runs/flow_grpo_geneval --suite geneval --rewards geneval --base",
        "training, computed: 62.7 GiB on each of 8 A100, 247 s an epoch, 69 h for 1,000 epochs, 548 GPU-hours"]


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


@pytest.mark.parametrize("name, base, tuned", [
    ("flow_grpo/pickscore", 22.34, 23.53), ("mix_grpo/flux", 0.313, 0.367), ("diffusion_nft/geneval", 0.24, 0.98),
    ("diffusion_nft/ocr", 0.12, 0.97), ("diffusion_nft/pickscore", 20.51, 24.03)])
def test_published_numbers_are_those_of_the_papers_tables(name, base, tuned):
    result = reproduce.RESULTS[name]
    assert (result.base, result.tuned) == (base, tuned) and "table" in result.source


def test_a_stand_in_is_trained_evaluated_and_shown_and_the_same_command_goes_on(tmp_path, monkeypatch, capfd):
    """All three commands as a user's, on the toy model: its number is a "paper's" here."""
    (tmp_path / "suite.jsonl").write_text("".join(json.dumps({"prompt": f"a red {shape}", "metadata": {}}) + "\n"
                                                  for shape in ("circle", "square", "triangle")))
    (tmp_path / "toy.yaml").write_text(
        "extends: starter\nreward: sharpness\nprecision: fp32\neval: {every: 0, prompts: 1, grid: 1, steps: 2, "
        "rewards: []}\ntrain: {epochs: 1, prompts: 1, group: 4, micro_batch: 4, steps: 4, updates: 1}\n"
        f"output: {tmp_path / 'runs'}\nname: toy\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    toy = reproduce.Result(str(tmp_path / "suite.jsonl"), "sharpness", "table 1 of a stand-in", 1, 1.0, 1.0, 0.5, 0.75,
                           str(tmp_path / "toy.yaml"))
    monkeypatch.setitem(reproduce.RESULTS, "toy/sharpness", toy)
    assert main(["reproduce", "toy/sharpness", "--gpus=1"]) == 0
    found = json.loads((tmp_path / "runs" / "toy" / "eval" / "suite" / "results.json").read_text())
    said = capfd.readouterr().out
    rows = [line.split() for line in said.splitlines()]
    for arm, published in (("base", "0.5"), ("tuned", "0.75")):
        ours = found["arms"][arm]["sharpness"]["all prompts"]
        assert [arm, published, f"{ours['mean']:.4g}", f"{ours['low']:.4g}", "to", f"{ours['high']:.4g}"] in rows
    assert "toy/sharpness: table 1 of a stand-in; 3 prompts" in said and said.count("$ flowgrpo ") == 3
    assert main(["reproduce", "toy/sharpness", "--gpus=1"]) == 0
    again = capfd.readouterr().out
    assert again.count("$ flowgrpo ") == 1 and "table 1 of a stand-in" in again  # the run is there


@pytest.mark.parametrize("source, suite, folder", [
    ("runs/mine", "geneval", "runs/mine/eval/geneval"), ("owner/model", "geneval", "runs/eval/owner_model/geneval"),
    ("runs/mine", "hub:owner/set?split=test", "runs/mine/eval/hub_owner_set_split_test")])
def test_an_evaluation_has_a_folder_without_output(tmp_path, monkeypatch, source, suite, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("model: starter\n")
    assert folder_of(source, suite) == Path(folder)
