"""Opening a run executes nothing that its folder names; the command line, or --trust-run, names what is executed."""

import base64
import contextlib
import io
import json
import shutil
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
import yaml

import flowgrpo
from flowgrpo import rewards, trust, user_code
from flowgrpo.cli import main
from flowgrpo.cli.options import parse_rewards
from flowgrpo.config import parse
from flowgrpo.contrib import json_api
from flowgrpo.contrib.engine.client import Engine
from flowgrpo.errors import UserError
from flowgrpo.rewards.geneval.detectors import Remote
from flowgrpo.rewards.remote import exchange
from flowgrpo.rewards.vlm_judge.judge import Judge
from flowgrpo.serving import client
from tests.evaluation.test_images import make_run
from tests.helpers.commands import Terminal
from tests.helpers.refusals import message
from tests.helpers.servers import running

EVIL = """
from pathlib import Path
Path({marker!r}).touch()

def dark(images, prompts):
    return (1 - images.flatten(1).mean(1)).tolist()

def changed(method):
    return method
"""


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


@pytest.mark.parametrize("changes", [
    {"reward": {"mine": {"use": "{run}/evil.py:dark"}}},
    {"reward": "sharpness", "eval": {"rewards": {"tiers": {"use": "tiered", "args": {
        "tiers": [{"rewards": {"{run}/evil.py:dark": 1.0}}]}}}}},
    {"reward": {"judge": {"args": {"url": "http://127.0.0.1:9/v1", "key_env": "HOME"}}}},
    {"reward": "http://127.0.0.1:9/dark"}, {"reward": "code_run"}])
def test_every_way_of_naming_code_or_an_address_is_left_out(evil, tmp_path, capsys, changes):
    rewritten(evil, **json.loads(json.dumps(changes).replace("{run}", str(evil))))
    assert "left out: reward " in said(capsys, "grid", evil, "--count=1")
    assert not (tmp_path / "marker").exists()


def test_a_runs_program_is_not_executed(evil, tmp_path, capsys):
    (evil / "python").write_text(f"#!/bin/sh\ntouch {tmp_path}/marker\n")
    (evil / "python").chmod(0o755)
    rule = {"use": "vbench", "args": {"python": f"{evil}/python"}}
    rewritten(evil, reward={"v": rule})
    assert "left out: reward 'v'" in said(capsys, "grid", evil, "--count=1")
    with trust.opening(), pytest.raises(UserError, match="a run's folder names this code"):
        rewards.find(rule["use"], rule["args"])
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


# --- recipes from elsewhere -------------------------------------------------------------------------------------------
HTTP = {"use": "http", "args": {"url": "http://there:1/x", "key_env": "HF_TOKEN"}}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working folder beside those of recipes from elsewhere."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def from_elsewhere(folder, **values):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "given.yaml").write_text(yaml.safe_dump({"extends": "starter"} | values))
    return folder / "given.yaml"


@pytest.mark.parametrize("values, does", [
    ({"reward": {"e": HTTP}}, "sends the key in HF_TOKEN (reward.e.args.key_env); sends samples to http://there:1/x"),
    ({"reward": {"http://there:1/pickscore": 1.0}}, "sends samples to http://there:1/pickscore"),
    ({"reward": "https://there/a"}, "sends samples to https://there/a"),
    ({"reward": {"judge": {"args": {"key_env": "AWS_KEY"}}}}, "sends the key in AWS_KEY (reward.judge.args.key_env)"),
    ({"reward": {"h": {"use": "http://127.0.0.1:1/a", "args": {"token_file": "~/.cache/token"}}}},
     "sends the token of the file ~/.cache/token (reward.h.args.token_file)"),
    ({"reward": {"g": {"use": "gated", "args": {"reward": {"use": "judge", "args": {"url": "http://there/v1"}}}}}},
     "sends samples to http://there/v1"),
    ({"eval": {"rewards": {"e": HTTP}}}, "sends the key in HF_TOKEN (eval.rewards.e.args.key_env)"),
    ({"rollout": {"engine": "http://there:30000"}}, "sends samples to http://there:30000"),
    ({"phases": [{"at": 0.5, "set": {"rollout.engine": "http://there:2"}}]}, "sends samples to http://there:2"),
    ({"reward": "mine.py:score"}, "executes code (mine.py:score)"),
    ({"reward": "mi\nne.py:score"}, "executes code (mi ne.py:score)"),
    ({"reward": {"e": {"use": "mi\u2028\rne.py:score"}}}, r"executes code (mi\u2028 ne.py:score)"),
    ({"parts": {"kernel": {"type": "\tmine.py:Kernel"}}}, "executes code ( mine.py:Kernel)"),
    ({"reward": {"geneval": {"args": {"detector": "d\n.py:detect"}}}}, "executes code (d .py:detect)"),
    ({"reward": {"geneval": {"args": {"detector": "http:\n//there/d"}}}}, "sends samples to http: //there/d"),
    ({"reward": {"vbench": {"args": {"python": "./mine"}}}}, "runs the program ./mine (reward.vbench.args.python)"),
    ({"reward": {"pyiqa:nima": {"args": {"options": {"pretrained_model_path": "x.pth"}}}}},
     "gives another package {'pretrained_model_path': 'x.pth'} (reward.pyiqa:nima.args.options)"),
    ({"method": "mix_grpo+mine.py:changed"}, "executes code (mix_grpo+mine.py:changed)"),
    ({"reward": {"code_run": 1.0}}, "executes code (code_run)"),
    ({"trust_remote_code": True}, "runs code that comes with a model (trust_remote_code)"),
    ({"output": "/etc/cron.d"}, "writes to /etc/cron.d (output)"),
    ({"output": "../given"}, "writes to ../given (output)"),
    ({"output": "runs/../../x"}, "writes to runs/../../x (output)"),
    ({"output": "linked/x"}, "writes to linked/x (output)"),
    ({"output": "~/.config/autostart"}, "writes to ~/.config/autostart (output)"),
    ({"reward": {"judge": {"args": {"writer": {"model": "m"}, "file": "~/.profile"}}}},
     "uses the file ~/.profile (reward.judge.args.file)"),
    ({"cache": "/var/tmp/c"}, "writes to /var/tmp/c (cache)"),
    ({"rollout": {"folder": "~root/loras"}}, "writes to ~root/loras (rollout.folder)"),
    ({"phases": [{"at": 0.5, "set": {"rollout.folder": "/srv"}}]}, "writes to /srv (phases.0.set.rollout.folder)")])
def test_a_recipe_from_elsewhere_reaches_out_only_where_it_is_trusted(values, does, tmp_path, monkeypatch, here):
    given = from_elsewhere(tmp_path / "given", **values)
    (here / "linked").symlink_to(tmp_path / "given")
    caught = message(parse.load, given, trusted=False)
    assert caught.startswith(f"{given} ") and does in caught
    with pytest.raises(UserError, match="--trust"):  # so does one that extends it
        (here / "own.yaml").write_text(f"extends: {given}\n")
        parse.load("own.yaml", trusted=False)
    assert parse.load(given, trusted=True)
    monkeypatch.chdir(tmp_path)  # which holds it
    assert parse.load(given, trusted=False)


@pytest.mark.parametrize("values", [{}, {"output": "runs"}, {"output": "./a/../b", "cache": "c"}, {"output": "..x/~"}])
def test_a_recipe_from_elsewhere_may_write_below_the_working_folder(values, tmp_path, here):
    given = from_elsewhere(tmp_path / "given", **values)
    assert parse.load(given, trusted=False).output == values.get("output", "runs")
    assert parse.load(given, {"output": str(tmp_path)}, trusted=False).output == str(tmp_path)  # of the command line


def test_what_the_command_line_names_is_its_own(tmp_path, here):
    given = from_elsewhere(tmp_path / "given", reward={"e": HTTP}, train={"epochs": 2})
    assert parse.load(given, {"reward": "scene"}, trusted=False).reward == "scene"
    with pytest.raises(UserError, match="sends the key in HF_TOKEN"):  # to an address of the command line
        parse.load(given, {"reward.e.args.url": "http://127.0.0.1:1/x"}, trusted=False)
    plain = from_elsewhere(tmp_path / "plain", train={"epochs": 3})
    config = parse.load(plain, {"reward": '{e: {use: http, args: {url: "http://there/"}}}'}, trusted=False)
    assert config.train.epochs == 3 and "e" in config.trained


@pytest.mark.parametrize("command", [["train"], ["check"], ["prompts", "encode"]])
def test_commands_refuse_it_in_a_line(command, tmp_path, capsys, here):
    given = from_elsewhere(tmp_path / "given", reward={"e": HTTP}, cache=str(tmp_path / "cache"))
    [line] = said(capsys, *command, given, code=2).splitlines()
    assert line == (f"flowgrpo: error: {given} sends the key in HF_TOKEN (reward.e.args.key_env); sends samples to "
                    f"http://there:1/x; writes to {tmp_path}/cache (cache): it is neither packaged nor below the "
                    "working folder, so it may not: read it, and --trust (from Python: trust=True) lets it")
    assert "sends the key in HF_TOKEN" in message(flowgrpo.align, recipe=given)
    with pytest.raises(UserError, match="copy it below the working folder"):
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"e": HTTP}))
        parse_rewards(str(tmp_path / "rules.yaml"))


@pytest.mark.parametrize("tagged", ["reward: !!binary {}", "reward: {{e: {{use: !!binary {}}}}}",
                                    "eval: {{rewards: !!set {{../given/mine.py:score}}}}",
                                    "eval: {{rewards: !!pairs [../given/mine.py:score: 1]}}"])
def test_a_value_of_yaml_is_one_of_json(tagged, tmp_path):
    code = base64.b64encode(b"../given/mine.py:score").decode()
    (tmp_path / "given.yaml").write_text(f"extends: starter\n{tagged.format(code)}\n")
    assert "could not determine a constructor for the tag" in message(parse.load, tmp_path / "given.yaml")


@pytest.mark.parametrize("values, error", [
    ({"reward": "mine.py:score"}, "executes code (mine.py:score)"), ({"reward": "https://there/a"}, "sends samples to"),
    ({"train": {"epochs": 2}}, None)])
def test_a_repository_below_the_working_folder_was_cloned(values, error, tmp_path, monkeypatch):
    given = from_elsewhere(tmp_path / "given" / "recipes", **values)
    (tmp_path / "given" / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    caught = message(parse.load, given, trusted=False) if error else parse.load(given, trusted=False) and None
    assert caught is None or error in caught and "it is in a repository of its own, so it may not" in caught
    assert parse.load(given, {"reward": "scene"}, trusted=False) and parse.load(given, trusted=True)
    monkeypatch.chdir(tmp_path / "given")  # the user works in it
    assert parse.load(given, trusted=False)


def test_no_code_of_another_recipe_is_executed_while_one_from_elsewhere_runs(tmp_path, here):
    given, plain = from_elsewhere(tmp_path / "given"), here / "own.yaml"
    (here / "code.py").write_text(EVIL.format(marker=str(tmp_path / "marker")))
    plain.write_text("extends: starter\nreward: code.py:dark\n")
    with trust.command():
        parse.load(given, trusted=False)
        assert "which is not yours, executes this code" in message(user_code.from_file, "code.py:dark", "reward")
        assert "which is not yours, sends samples to https://there/v1" in message(Judge, url="https://there/v1")
        assert Judge(url="http://127.0.0.1:1/v1")
        assert not (tmp_path / "marker").exists()
        parse.load(plain, trusted=False)  # `compare methods` takes several
        assert user_code.from_file("code.py:dark", "reward")
    assert Judge(url="https://there/v1")


def test_labels_by_a_file_of_rewards_from_elsewhere(tmp_path, capsys, here):
    (tmp_path / "evil.py").write_text(EVIL.format(marker=str(tmp_path / "marker")))
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({f"{tmp_path}/evil.py:dark": 1.0}))
    [line] = said(capsys, "reward", "label", tmp_path, f"--rewards={tmp_path}/rules.yaml", "--output=pairs.jsonl",
                  code=2).splitlines()
    assert "executes code" in line and "copy it below the working folder" in line
    assert not (tmp_path / "marker").exists()


# --- keys -------------------------------------------------------------------------------------------------------------
BRAND = {"key_env": "BRAND_KEY"}
SENT = "sends the key in BRAND_KEY to https://there.example/v1"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A recipe of the working folder that sends a key elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(trust, "_answers", set())
    for name in ("RANK", "WORLD_SIZE", "FLOWGRPO_REWARD_TOKEN", "FLOWGRPO_REWARD_HOSTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BRAND_KEY", "k3y")
    (tmp_path / "own.yaml").write_text(recipe_of("https://there.example/v1"))
    return tmp_path / "own.yaml"


def recipe_of(url):
    return yaml.safe_dump({"extends": "starter", "reward": {"e": {"use": "http", "args": {"url": url} | BRAND}}})


def made(recipe, overrides={}, trusted=False):
    """Make the rewards of a recipe, as a run does."""
    with trust.command():
        return rewards.compose(parse.load(recipe, dict(overrides), trusted).trained)


def asked(monkeypatch, answer, recipe, *given, **named):
    """The question at a terminal, and whether the rewards were made."""
    monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    try:
        return screen, bool(made(recipe, *given, **named))
    except UserError as error:
        return screen, str(error)
    finally:
        monkeypatch.setattr("sys.stdin", io.StringIO())


@pytest.mark.parametrize("command", [["train"], ["train", "--reward.e.args.timeout=3"]])
def test_a_key_leaves_for_no_address_that_was_not_agreed_to(own, command, capsys):
    lines = said(capsys, *command, own, code=2).splitlines()
    assert lines[-1] == (f"flowgrpo: error: {own} {SENT}, and no terminal is here to ask whether you agree: run it "
                         "once at one, or --trust (from Python: trust=True) lets it")
    assert not (own.parent / "runs").exists()
    assert SENT in message(flowgrpo.align, recipe=own)


@pytest.mark.parametrize("overrides", [
    {"reward.e.args.url": "https://other.example/v1"}, {"reward.e.args.key_env": "BRAND_KEY"}, {"reward": "scene"},
    {"reward.e.args.url": "http://127.0.0.1:1/v1"}, {"reward.e.args.url": "http://localhost:1,http://[::1]:1/v1"},
    {"reward": "{e: {use: http, args: {url: 'https://there.example/v1', key_env: BRAND_KEY}}}"}])
def test_the_command_line_agrees_and_so_does_this_machine(own, overrides):
    assert made(own, overrides) and made(own, trusted=True)


@pytest.mark.parametrize("reward", [
    {"judge": {"args": BRAND | {"url": "https://there.example/v1/chat/completions"}}},
    {"g": {"use": "gated", "args": {"thresholds": [0], "rewards": [
        "sharpness", {"use": "judge", "args": BRAND | {"url": "http://[::1]:1/v1,https://there.example/v1"}}]}}}])
def test_judges_and_rewards_within_others_ask_too(own, reward):
    own.write_text(yaml.safe_dump({"extends": "starter", "reward": reward}))
    assert SENT in message(made, own)


def test_an_answer_is_remembered_with_the_recipe(own, monkeypatch):
    screen, result = asked(monkeypatch, "", own)
    assert screen.getvalue() == f"{own}:\n  {SENT}\nDo you let it, as long as it stays as it is? [y/N] "
    assert result == f"{own} {SENT}: you did not let it" and not (own.parent / "config").exists()
    assert asked(monkeypatch, "y", own)[1] is True
    file = own.parent / "config" / "flowgrpo" / "agreed.txt"
    assert file.stat().st_mode & 0o777 == 0o600 and file.read_text().count("\n") == 1 and SENT in file.read_text()
    monkeypatch.setattr(trust, "_answers", set())  # as of another process
    assert made(own)
    assert made(own, {"train.epochs": "3"})
    own.write_text(own.read_text() + "train: {epochs: 3}\n")  # another content
    assert SENT in message(made, own)
    own.write_text(recipe_of("https://there.example/v2"))
    assert "v2, and no terminal" in message(made, own)
    own.write_text(recipe_of("https://there.example/v1"))
    assert made(own)
    file.chmod(0o666)  # anybody may have written it
    assert SENT in message(made, own)
    assert asked(monkeypatch, "y", own)[1] is True
    assert file.stat().st_mode & 0o777 == 0o600 and file.read_text().count("\n") == 1


def test_another_recipe_of_the_same_command_sends_no_key(own):
    (own.parent / "other.yaml").write_text("extends: starter\n")
    with trust.command():
        parse.load(own.parent / "other.yaml", trusted=False)
        assert message(rewards.compose, parse.load(own, trusted=False).trained).startswith(f"{own} {SENT}")


def test_a_base_that_changed_asks_again(own, monkeypatch):
    own.rename(base := own.parent / "base.yaml")
    own.write_text("extends: base.yaml\n")
    assert asked(monkeypatch, "yes", own)[1] is True and made(own)
    base.write_text(base.read_text() + "seed: 3\n")
    assert SENT in message(made, own)


@pytest.mark.parametrize("variables", [{"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_processes_of_a_launcher_do_not_ask(own, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    screen, result = asked(monkeypatch, "y", own)
    assert "no terminal is here" in result and "[y/N]" not in screen.getvalue()


def test_a_recipe_from_elsewhere_is_asked_for_with_the_code_that_it_names(own, monkeypatch, here):
    given = from_elsewhere(own.parent / "given", reward={"code.py:dark": 1.0, "e": HTTP})
    Path("code.py").write_text(EVIL.format(marker="marker"))
    monkeypatch.setenv("HF_TOKEN", "hf")
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    assert "you did not let it" in message(parse.load, given, trusted=False)
    assert screen.getvalue().splitlines()[1:-1] == [
        "  executes code (code.py:dark)", "  sends the key in HF_TOKEN (reward.e.args.key_env)",
        "  sends samples to http://there:1/x", "  sends the key in HF_TOKEN to http://there:1/x"]
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert parse.load(given, trusted=False)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with trust.command():
        assert parse.load(given, trusted=False) and user_code.from_file("code.py:dark", "reward")
        assert "which is not yours, executes this code" in message(user_code.from_file, "other.py:dark", "reward")
    Path("code.py").write_text("dark = print\n")
    assert "executes code (code.py:dark)" in message(parse.load, given, trusted=False)


def test_tokens_of_reward_servers_ask_too(own, monkeypatch):
    (own.parent / "token").write_text("t0ken")
    own.write_text(yaml.safe_dump({"extends": "starter", "reward": {"a": {
        "use": "https://there.example/a", "args": {"token_file": str(own.parent / "token")}}}}))
    assert f"sends the token of the file {own.parent}/token to https://there.example/a" in message(made, own)
    own.write_text(yaml.safe_dump({"extends": "starter", "reward": "https://there.example/a"}))
    monkeypatch.setenv("FLOWGRPO_REWARD_TOKEN", "t0ken")
    assert "sends the token in FLOWGRPO_REWARD_TOKEN to https://there.example/a" in message(made, own)
    monkeypatch.setenv("FLOWGRPO_REWARD_HOSTS", "there.example")  # which agrees
    assert "no terminal" not in message(made, own)


def test_a_terminal_shows_no_escape_of_a_recipe(own, monkeypatch, here):
    screen, result = asked(monkeypatch, "n", from_elsewhere(own.parent / "given", reward="x\x1b[2K\u202e.py:dark"))
    assert "\x1b" not in screen.getvalue() and "\u202e" not in screen.getvalue() and "did not" in result

def test_what_goes_where_is_printed_before_it_goes(monkeypatch, capsys):
    monkeypatch.setenv("BRAND_KEY", "k3y")
    json_api.Http(url="http://127.0.0.1:1/score?version=2", key_env="BRAND_KEY")
    Judge(url="https://judge.example/v1", show=["output", "source"])
    Engine("http://127.0.0.1:7")
    assert capsys.readouterr().err.splitlines() == [
        "reward 'http' sends prompts, images and the key in BRAND_KEY to http://127.0.0.1:1/score",
        "a judge sends prompts, samples and source images to https://judge.example/v1",
        "rollout.engine sends prompts and the folder of the LoRA to http://127.0.0.1:7"]


@pytest.mark.parametrize("url, goes", [
    ("http://127.0.0.1:1/v1", True), ("http://localhost:1/v1", True), ("http://[::1]:1/v1", True),
    ("https://there/v1", True), ("http://there/v1", False), ("http://10.0.0.7/v1", False), ("http://127.1/v1", False),
    ("http://localhost.there/v1", False), ("http://127.0.0.1.there/v1", False), ("http://0.0.0.0:1/v1", False),
    ("https://there/v1,http://there/v1", False), ("http://LOCALHOST/v1", True)])
def test_a_key_goes_unencrypted_to_this_machine_alone(url, goes, monkeypatch):
    monkeypatch.setenv("BRAND_KEY", "k3y")
    for reward in (json_api.Http, Judge):
        reward(url=url)
        if goes:
            reward(url=url, key_env="BRAND_KEY")
            continue
        with pytest.raises(UserError, match=r"the key in BRAND_KEY would go to http://\S+ unencrypted: use https://"):
            reward(url=url, key_env="BRAND_KEY")


def test_the_token_goes_to_hosts_that_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("FLOWGRPO_REWARD_TOKEN", "t0ken")
    key = client.bound_token(None, ["https://there/a"])
    assert key.value == "t0ken" and key.source == "the token in FLOWGRPO_REWARD_TOKEN" and "t0ken" not in repr(key)
    with pytest.raises(UserError, match="unencrypted.*FLOWGRPO_REWARD_HOSTS=HOST allows it"):
        key.require_private("reward", ["http://there:8/a"])
    monkeypatch.setenv("FLOWGRPO_REWARD_HOSTS", "node7, 10.0.0.7")
    client.bound_token(None, ["http://node7:8/a", "http://127.0.0.1/a"]).require_private("reward", ["http://node7:8/a"])
    assert client.bound_token(None, ["https://there/a"]) is None
    (tmp_path / "token").write_text("other")
    assert client.bound_token(tmp_path / "token", ["https://there/a"]).value == "other"


class Recording(BaseHTTPRequestHandler):
    """Redirects all that comes to `away`, if there is such an address; else keeps it."""

    away, came = "", []

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.came.append(self.headers.get("Authorization"))
        self.send_response(int(self.path[1:4]) if self.away else 200)
        self.send_header("Location", self.away)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = _answer

    def log_message(self, *_) -> None:
        pass


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_takes_a_key_along(status, monkeypatch, tmp_path):
    (tmp_path / "token").write_text("k3y")
    monkeypatch.setenv("BRAND_KEY", "k3y")
    kinds = [type("Kind", (Recording,), {"came": []}) for _ in range(2)]
    image, once = torch.zeros(1, 3, 8, 8), {"key_env": "BRAND_KEY", "retries": 0, "timeout": 5}
    with contextlib.ExitStack() as stack:
        first, second = (f"http://127.0.0.1:{stack.enter_context(running(server)).server_port}/{status}"
                         for server in [HTTPServer(("127.0.0.1", 0), kind) for kind in kinds])
        kinds[0].away = f"{second}/else"
        for ask in (lambda: json_api.Http(url=first, **once)(image, ["x"], [{}]),
                    lambda: Judge(url=first, model="m", **once)(image, ["x"], [{}]),
                    lambda: client.Remote(first, token_file=str(tmp_path / "token"), retries=0),
                    lambda: Remote(first)(image), lambda: Engine(first, retries=0).info()):
            with pytest.raises((UserError, RuntimeError)):
                ask()
    assert kinds[0].came.count("Bearer k3y") >= 3 and kinds[1].came == []


@pytest.mark.parametrize("text", [
    "k-2f9a.secret", "k-2f9a.s ecret", "K-2F9A.SECRET", "terces.a9f2-k", "ay0yZjlhLnNlY3JldA==",
    "echo: YWstMmY5YS5zZWNyZXR6eg==", "YWJrLTJmOWEuc2VjcmV0eno=", "6b2d3266 39612e736563726574",
    r"\u006b\u002d\u0032\u0066\u0039\u0061\u002e\u0073\u0065\u0063\u0072\u0065\u0074",
    "%6b%2d%32%66%39%61%2e%73%65%63%72%65%74"])
def test_no_message_repeats_the_key(text):
    key = exchange.Key("k-2f9a.secret", "a key")
    assert key.mask(text) == exchange.MASK and key.mask("Bearer k-2f9a.secret!") == f"Bearer {exchange.MASK}!"
    assert key.mask("a secret of k-2") == "a secret of k-2"
