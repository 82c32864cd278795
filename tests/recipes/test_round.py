"""The whole round of the three shallowest recipes: build, check, train, sample, grid, export, stock libraries."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import train_recipes

ROOT = Path(__file__).parents[2]


STEPS = ["build", "check", "train", "sample", "grid", "export", "stock"]


@pytest.mark.parametrize("names, stock", [(["qwen3_0_6b", "smollm2_135m"], "the same text"),
                                          (["sd15"], "largest difference 0 of 255, mean 0;")], ids=["texts", "images"])
def test_a_recipe_runs_from_its_model_to_stock_libraries(names, stock, tmp_path, monkeypatch):
    """The card's lines draw and write what `sample` does, bit for bit; the table can be printed again."""
    command = [sys.executable, str(ROOT / "scripts" / "docs" / "train_recipes.py"), *names, f"--folder={tmp_path}",
               f"--json={tmp_path / 'rows.json'}"]
    told = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert told.returncode == 0, told.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["recipe"] for row in rows] == sorted(names)
    for row in rows:
        assert row["failed"] is None and row["ran"] == STEPS, told.stdout
        assert row["stock"].startswith(stock) and row["peak"] > 0.1 and row["estimate"] > 0
    monkeypatch.setattr(train_recipes, "ROUND", tmp_path / "rows.json")
    section = " ".join(train_recipes.section().split())
    assert f" took {len(names)} recipes " in section and "Failed" not in section and "every pixel. `docs" in section
    (tmp_path / "rows.json").write_text(json.dumps([
        rows[0] | {"stock": "largest difference 5 of 255, mean 1"}, {"recipe": "sdxl", "failed": "train: x"}]))
    section = " ".join(train_recipes.section().split())
    assert f"but for `{names[0]}` (5 of 255); of a run with int8 weights" in section
    assert "a GPU. Failed: `sdxl` (train). Images" in section
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    again = subprocess.run([*command, "--table"], capture_output=True, text=True)
    assert again.returncode == 0
    assert sorted(json.loads((tmp_path / "rows.json").read_text()), key=str) == sorted(rows, key=str)
