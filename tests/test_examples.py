"""The notebooks of examples/ run as they stand, with fewer epochs and prompts."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))
SMALL = {"EPOCHS": 1, "HELD_OUT": 2}


def cells(notebook: Path) -> list[str]:
    """Code cells, without the installation, and with the small numbers."""
    code = ["".join(cell["source"]) for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]
            if cell["cell_type"] == "code"]
    assert "%pip" in code[0]
    return [re.sub(r"^(EPOCHS|HELD_OUT) = \d+", lambda line: f"{line[1]} = {SMALL[line[1]]}", cell, flags=re.M)
            for cell in code[1:]]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch):
    import matplotlib
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "notebook"}
    for number, cell in enumerate(cells(notebook)):
        exec(compile(cell, f"{notebook.name}, cell {number}", "exec"), names)
    [*runs] = (tmp_path / "runs").iterdir()
    assert runs and all((run / "summary.json").is_file() for run in runs)
    assert not any(cell.get("outputs") for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"])


def test_there_are_four():
    assert [path.stem for path in NOTEBOOKS] == ["align", "compare_methods", "custom_reward", "language_model"]
