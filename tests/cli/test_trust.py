"""Opening a run executes nothing that its folder names; the command line, or --trust-run, names what is executed."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from flowgrpo import trust, user_code
from flowgrpo.cli import main
from flowgrpo.errors import UserError
from tests.evaluation.test_images import make_run
from tests.helpers import tiny

EVIL = """
from pathlib import Path
Path({marker!r}).touch()

def dark(images, prompts):
    return (1 - images.flatten(1).mean(1)).tolist()

def changed(method):
    return method
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tiny.sd3(), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def evil(tmp_path, model):
    """A finished run whose reward lies in a file that writes a marker."""
    run = make_run(tmp_path / "run", model, 0.3)
    (run / "evil.py").write_text(EVIL.format(marker=str(tmp_path / "marker")))
    shutil.copy(run / "prompts.txt", tmp_path / "suite.txt")
    return rewritten(run, reward=f"{run}/evil.py:dark")


def rewritten(run, **changes):
    """The run with other keys of its configuration."""
    config = yaml.safe_load((run / "config.yaml").read_text()) | changes
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    summary = {"before": {}, "after": {}, "unit": "denoiser evaluations", "epochs": 1}
    (run / "summary.json").write_text(json.dumps(summary))
    return run


def said(capsys, *arguments: object, code: int = 0) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == code
    return capsys.readouterr().err


COMMANDS = {
    "grid": ["compare", "grid", "{run}", "--count=1"],
    "columns": ["compare", "grid", "{run}", "--count=1", "--columns=seeds", "--values=1"],
    "sample": ["sample", "{run}", "--prompt=x", "--steps=1", "--output={run}/drawn"],
    "lora": ["sample", "{model}", "--lora={run}", "--prompt=x", "--steps=1", "--output={run}/drawn"],
    "export": ["export", "{run}", "--form=merged"], "report": ["report", "{run}"]}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_executes_a_runs_file(evil, model, tmp_path, capsys, command):
    said(capsys, *(argument.format(run=evil, model=model) for argument in COMMANDS[command]))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("command", ["grid", "columns"])
def test_a_grid_leaves_the_reward_out_and_says_so(evil, model, tmp_path, capsys, command):
    arguments = [argument.format(run=evil, model=model) for argument in COMMANDS[command]]
    lines = [line for line in said(capsys, *arguments).splitlines() if line.startswith("left out")]
    assert lines == [f"left out: reward '{evil}/evil.py:dark', which executes code or sends samples to an address that "
                     "the run's folder names; --trust-run includes it"]
    assert "left out" not in said(capsys, *arguments, "--trust-run")
    assert (tmp_path / "marker").exists()


def test_eval_executes_what_its_command_line_names(evil, tmp_path, capsys):
    common = ["eval", evil, f"--suite={tmp_path}/suite.txt", "--steps=1"]
    line = said(capsys, *common, f"--output={tmp_path}/a", code=2)
    assert "name rewards by --rewards, or add --trust-run" in line and line.count("\n") == 1
    assert not (tmp_path / "marker").exists()
    said(capsys, *common, f"--output={tmp_path}/b", f"--rewards={evil}/bright.py:bright")
    assert not (tmp_path / "marker").exists()
    said(capsys, *common, f"--output={tmp_path}/c", f"--rewards={evil}/evil.py:dark")
    assert (tmp_path / "marker").exists()


def test_eval_of_a_trusted_run_takes_its_rewards(evil, tmp_path, capsys):
    said(capsys, "eval", evil, f"--suite={tmp_path}/suite.txt", "--steps=1", f"--output={tmp_path}/a", "--trust-run")
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("changes", [
    {"reward": {"mine": {"use": "{run}/evil.py:dark"}}},
    {"reward": "sharpness", "eval": {"rewards": {"tiers": {"use": "tiered", "args": {
        "tiers": [{"rewards": {"{run}/evil.py:dark": 1.0}}]}}}}},
    {"reward": {"judge": {"args": {"url": "http://127.0.0.1:9/v1", "key_env": "HOME"}}}},
    {"reward": "http://127.0.0.1:9/dark"}, {"reward": "code_run"}])
def test_every_way_of_naming_code_or_an_address_is_left_out(evil, tmp_path, capsys, changes):
    filled = json.loads(json.dumps(changes).replace("{run}", str(evil)))
    rewritten(evil, **filled)
    assert "left out: reward " in said(capsys, "grid", evil, "--count=1")
    assert not (tmp_path / "marker").exists()


def test_a_label_does_not_bring_the_runs_own_arguments(evil, tmp_path, capsys):
    rewritten(evil, reward={"judge": {"args": {"url": "http://127.0.0.1:9/v1", "key_env": "HOME"}}})
    line = said(capsys, "eval", evil, f"--suite={tmp_path}/suite.txt", "--rewards=judge", f"--output={tmp_path}/a",
                code=2)
    assert "reward 'judge' executes code or sends samples to an address" in line and line.count("\n") == 1


@pytest.mark.parametrize("changes", [{"method": "mix_grpo+{run}/evil.py:changed"},
                                     {"parts": {"kernel": {"type": "{run}/evil.py:Kernel"}}}])
def test_a_method_of_a_file_is_refused(evil, model, tmp_path, capsys, changes):
    rewritten(evil, **json.loads(json.dumps(changes).replace("{run}", str(evil))))
    (evil / "checkpoints" / "epoch-00001").mkdir(parents=True)
    shutil.copy(evil / "pytorch_lora_weights.safetensors", evil / "checkpoints" / "epoch-00001" / "state.safetensors")
    line = said(capsys, "sample", evil, "--epoch=1", "--prompt=x", f"--output={tmp_path}/drawn", code=2)
    assert "a run's folder names this code" in line and "--trust-run" in line and line.count("\n") == 1
    assert not (tmp_path / "marker").exists()


def test_trust_remote_code_is_not_taken_from_a_run(evil, model, tmp_path, capsys):
    own = shutil.copytree(model, tmp_path / "model")
    (own / "scheduler" / "evil.py").write_text(EVIL.format(marker=str(tmp_path / "marker")))
    index = json.loads((own / "model_index.json").read_text()) | {"scheduler": ["evil", "Evil"]}
    (own / "model_index.json").write_text(json.dumps(index))
    rewritten(evil, model=str(own), trust_remote_code=True)
    for command in (["compare", "grid", evil], ["sample", evil, "--prompt=x"], ["export", evil, "--form=merged"]):
        told = said(capsys, *command, code=2)
        assert "trust_remote_code is not taken from a run's folder; --trust-run takes it" in told
        assert not (tmp_path / "marker").exists()
    said(capsys, "sample", evil, "--prompt=x", "--trust-run", code=2)  # its scheduler is none
    assert (tmp_path / "marker").exists()


def test_files_are_open_again_after_the_command(evil, tmp_path):
    with trust.opening("red.py:red"), pytest.raises(UserError, match="opening a run executes none"):
        user_code.from_file(f"{evil}/evil.py:dark", "reward")
    assert callable(user_code.from_file(f"{evil}/evil.py:dark", "reward"))
