"""Levels of recipes in docs/recipes.md: what a run's files show of its recipe."""

import json
import sys
from pathlib import Path

import pytest

from flowgrpo.config import load

sys.path.append(str(Path(__file__).parents[1] / "scripts" / "docs"))

import verify_recipe  # noqa: E402

NAME = "sdxl_24gb"
RECIPE = load(verify_recipe.ROOT / "configs" / f"{NAME}.yaml")


def run(folder: Path, epochs: int = 0, low: float | None = None, device: str = "cuda:0 (NVIDIA H100)", **changes
        ) -> Path:
    """The files of a run of the recipe with so many epochs; low: the lower end of the reward's change at the end."""
    made = folder / NAME
    (made / "report").mkdir(parents=True, exist_ok=True)
    (made / "config.yaml").write_text(load(verify_recipe.ROOT / "configs" / f"{NAME}.yaml", changes).yaml())
    (made / "report" / "machine.json").write_text(json.dumps({"device": device, "processes": "1", "commit": "abc"}))
    (made / "metrics.jsonl").write_text("".join(f'{{"epoch": {epoch + 1}}}\n' for epoch in range(epochs)))
    (made / "before.json").write_text("{}")
    if low is not None:
        rows = {verify_recipe.ALL: {"change": {"low": low}}}
        (made / "summary.json").write_text(json.dumps({"compared": {name: rows for name in RECIPE.trained}}))
    return made


@pytest.mark.parametrize("epochs, low, level", [
    (0, None, "loads"), (1, None, "1 epoch"), (12, 0.1, "12 epochs"), (RECIPE.train.epochs, 0.1, "curve"),
    (RECIPE.train.epochs, -0.1, f"{RECIPE.train.epochs} epochs"),
    (RECIPE.train.epochs, None, f"{RECIPE.train.epochs} epochs")])
def test_the_level_is_what_the_files_show(epochs, low, level, tmp_path):
    assert verify_recipe.level(run(tmp_path, epochs, low), RECIPE) == level


@pytest.mark.parametrize("given, told", [
    ({"device": "cpu"}, "ran on a CPU"), ({"train.lr": 1e-3}, "differs from its recipe in train"),
    ({"prompts": "ocr"}, "differs from its recipe in prompts")])
def test_another_run_does_not_count(given, told, tmp_path):
    with pytest.raises(SystemExit, match=told):
        verify_recipe.level(run(tmp_path, 3, **given), RECIPE)


def test_fewer_epochs_than_the_recipes_count_as_so_many(tmp_path):
    assert verify_recipe.level(run(tmp_path, 2, **{"train.epochs": 2}), RECIPE) == "2 epochs"


def test_the_file_is_written_and_read(tmp_path):
    file = tmp_path / "verified.json"
    file.write_text("{}")
    assert verify_recipe.verified(NAME, file) == "never"
    verify_recipe.main(run(tmp_path, 5), file)
    assert verify_recipe.verified(NAME, file) == "5 epochs" and json.loads(file.read_text())[NAME]["commit"] == "abc"


def test_the_file_names_recipes():
    assert all((verify_recipe.ROOT / "configs" / f"{name}.yaml").is_file() for name in json.loads(
        verify_recipe.FILE.read_text(encoding="utf-8")))
