"""The first screen of the command line, its groups, and the earlier names of commands."""

import json
import re

import pytest
import typer
from typer import rich_utils

from flowgrpo.cli import app, main
from flowgrpo.cli.root import RENAMED, TRAIN
from flowgrpo.config import recipes
from flowgrpo.data.sets import SETS
from tests.helpers.commands import commands

NARROW = 80  # characters of a terminal
PANELS = ["Train", "Look", "Share", "Extend"]


def shown(monkeypatch, capsys, *arguments: str) -> list[str]:
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", NARROW)
    monkeypatch.setattr(rich_utils, "FORCE_TERMINAL", False)
    assert main([*arguments, "--help"]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_first_screen_has_four_panels_of_commands_in_a_line_each(monkeypatch, capsys):
    lines = shown(monkeypatch, capsys)
    panels: dict[str, list[str]] = {}
    for line in lines:
        if found := re.match(r"╭─ (\w+) ─", line):
            panels[found[1]] = []
        elif line.startswith("│ "):
            panels[list(panels)[-1]].append(line)
    panels.pop("Options")
    assert list(panels) == PANELS and max(map(len, lines)) <= NARROW
    named = [re.match(r"│ ([a-z]+) +\w.*\. +│$", line)[1] for panel in panels.values() for line in panel]
    assert named == ["demo", "train", "taste", "check", "prepare", "list", "sample", "eval", "report", "export", "push",
                     "new", "reward", "prompts"]
    [last] = [line for line in lines if line.startswith(" Also:")]
    assert "flowgrpo compare" in last and "flowgrpo verify" in last and last.rstrip().endswith("flowgrpo contrib.")


@pytest.mark.parametrize("group", ["list", "reward", "prompts", "compare", "contrib"])
def test_a_group_has_a_line_for_each_command(group, monkeypatch, capsys):
    lines = [line for line in shown(monkeypatch, capsys, group) if line.startswith("│ ") and "--help" not in line]
    inner = [name.partition(" ")[2] for name in commands() if name.startswith(f"{group} ")]
    assert [line.split()[1] for line in lines] == inner and all(line.rstrip("│ ").endswith(".") for line in lines)


def test_every_command_is_on_the_first_screen_or_in_a_group():
    top = typer.main.get_command(app).commands
    assert {name for name, command in top.items() if command.hidden} == {"compare", "contrib", "reproduce", "verify"}
    assert {new for new in RENAMED.values()} <= set(commands()) and not set(RENAMED) & set(top)
    assert TRAIN == top["train"].rich_help_panel


@pytest.mark.parametrize("old", RENAMED)
def test_an_earlier_name_works_and_prints_a_line_with_the_new_one(old, capsys):
    assert main([old, "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err == (f"flowgrpo: `flowgrpo {old}` is now `flowgrpo {RENAMED[old]}`; the earlier name goes with "
                            "the next release\n")
    assert main([*RENAMED[old].split(), "--help"]) == 0
    again = capsys.readouterr()
    assert again.out == captured.out and f"flowgrpo {RENAMED[old]}" in again.out and again.err == ""


@pytest.mark.parametrize("arguments", [["prompts", "--json"], ["prompts", "geneval", "--count", "1", "--json"]])
def test_the_earlier_list_of_prompts_is_another_command_than_their_group(arguments, capsys):
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) and captured.err.startswith("flowgrpo: `flowgrpo prompts` is now `flowgrpo list "
                                                                "prompts`")
    assert main(["list", *arguments]) == 0
    assert capsys.readouterr() == (captured.out, "")


def test_mistakes_in_a_group_are_one_line(capsys):
    for arguments, told in ((["reward", "trian"], "No such command 'trian'"), (["lsit"], "No such command 'lsit'"),
                            (["reward", "train", "no.jsonl"], "Missing option '--output'"),
                            (["train-reward", "no.jsonl", "--output", "y"], "no.jsonl")):
        assert main(arguments) == 2
        said = capsys.readouterr().err.splitlines()
        assert told in said[-1] and said[-1].startswith("flowgrpo: error: ")
        assert len(said) == 1 + (arguments[0] in RENAMED)


def test_recipes_are_listed_with_what_they_take(capsys):
    assert main(["list", "recipes", "--json"]) == 0
    rows = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == recipes.names()
    assert rows["sdxl_24gb"] == {"recipe": "sdxl_24gb", "model": "stable-diffusion-xl-base-1.0", "method": "mix_grpo",
                                 "reward": "hpsv2.1", "GPUs": "One 4090 (24 GB)", "hours": "42", "peak GiB": "16.8"}
    assert rows["starter"]["GPUs"] == "any, or a CPU"
    assert main(["list", "recipes", "klein_24"]) == 0
    assert [word for word in capsys.readouterr().out.split() if word in rows] == ["flux2_klein_24gb"]
    assert main(["list", "recipes", "nothing_like_it"]) == 2
    assert "no recipe's row has 'nothing_like_it'" in capsys.readouterr().err


def test_sets_are_listed_with_their_role(capsys):
    assert main(["list", "prompts", "--json"]) == 0
    roles = {row["name"]: row["role"] for row in json.loads(capsys.readouterr().out)}
    assert roles == {name: one.role for name, one in SETS.items()}
    assert {name for name, role in roles.items() if role == "test"} == {
        "geneval_coco", "partiprompts", "dpg", "unigenbench", "vbench", "drawbench"}
