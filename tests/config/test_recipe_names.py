"""Recipes by name: the packaged one, unless there is a file of that name."""

from pathlib import Path

import pytest

from flowgrpo.cli import main
from flowgrpo.config import load, parse, recipes
from tests.helpers.refusals import error_line, message

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["starter", "sdxl_24gb", "sdxl_8x80"])
def test_a_name_is_the_packaged_recipe(name, tmp_path, monkeypatch):
    """From any folder, with the name of its run, and what it extends."""
    monkeypatch.chdir(tmp_path)
    assert load(name) == load(CONFIGS / f"{name}.yaml") and load(name).name == name


def test_every_recipe_is_packaged():
    assert recipes.names() == sorted(file.stem for file in CONFIGS.glob("*.yaml"))


def test_local_and_packaged_recipes_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sdxl_24gb").write_text("method: flow_grpo\n")
    (tmp_path / "starter").mkdir()
    assert load("sdxl_24gb").method == "flow_grpo" and load("sdxl_24gb").model == "starter"
    assert load("starter").parts["plan"] == {"size": 3, "order": "frozen"}
    (tmp_path / "mine.yaml").write_text("extends: sdxl_24gb\nreward: pick_score\n")
    found = load(tmp_path / "mine.yaml")
    assert found.reward == "pick_score" and found.name == "mine"
    assert found.model_copy(update={"reward": "hpsv2.1", "name": "sdxl_24gb"}) == load("sdxl_24gb")


def test_a_recipe_below_the_home_folder(tmp_path, monkeypatch):
    """By its own name and under `extends`; a folder named ~ is not looked for."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yaml").write_text("extends: starter\nprompts: ~/p.txt\n")
    (tmp_path / "mine.yaml").write_text("extends: ~/base.yaml\nseed: 3\n")
    found = load("~/mine.yaml")
    assert (found.seed, found.prompts, found.name) == (3, str(tmp_path / "p.txt"), "mine")
    (tmp_path / "mine.yaml").write_text("extends: ~nobody-of-this-name/base.yaml\n")
    with pytest.raises(UserError, match="mine.yaml: extends: ~nobody-of-this-name/base.yaml: there is no user 'nobody"):
        load("~/mine.yaml")


@pytest.mark.parametrize("given, told", [
    ("sdxl_24g", "no recipe 'sdxl_24g': did you mean 'sdxl_24gb'?"),
    ("nothing_near_it", "no recipe 'nothing_near_it'"),
    ("configs/sdxl_24gb.yaml", "no recipe at configs/sdxl_24gb.yaml: it does not exist: did you mean the packaged "
                               "recipe sdxl_24gb?"),
    ("no.yaml", "no recipe at no.yaml: it does not exist; expected a YAML file, or a packaged recipe such as starter")])
def test_what_is_neither_is_one_line(given, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message(load, given).startswith(told)


def test_demo_takes_keys_and_no_recipe(capsys):
    assert "use `flowgrpo train sdxl_24gb`" in error_line(capsys, "demo", "sdxl_24gb")
    assert "unknown option --train.lrr: did you mean '--train.lr'?" in error_line(capsys, "demo", "--train.lrr=1")
    assert "train.lr: got 'fast'" in error_line(capsys, "demo", "--train.lr=fast")


def test_demo_is_the_recipe_that_make_demo_ran():
    makefile = (CONFIGS.parent / "Makefile").read_text(encoding="utf-8")
    assert "$(BIN)/python -m flowgrpo demo\n" in makefile
    assert parse.load(recipes.FOLDER / "starter.yaml", {}) == load(CONFIGS / "starter.yaml")


def test_check_takes_a_recipes_file_in_place_of_a_model(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("extends: starter\n")
    assert main(["check", str(tmp_path / "mine.yaml")]) == 0
    assert "\nmodel " in capsys.readouterr().out
    assert main(["check", str(tmp_path / "none.yaml")]) == 2
    assert f"no recipe at {tmp_path / 'none.yaml'}: it does not exist" in capsys.readouterr().err
