"""The table and the curve of the language model's runs (scripts/build/train_smollm2.py), of a run trained here."""

import json
import math
import sys
from pathlib import Path

import pytest
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "scripts" / "build"))
sys.path.append(str(Path(__file__).parents[1] / "scripts" / "docs"))

import train_recipes  # noqa: E402
import train_smollm2  # noqa: E402

Z = 1.959963984540054


def wilson(right: int, count: int) -> tuple[float, float]:
    """Wilson's limits of a share."""
    share = right / count
    middle, half = share + Z * Z / 2 / count, Z * math.sqrt(share * (1 - share) / count + Z * Z / 4 / count**2)
    return (middle - half) / (1 + Z * Z / count), (middle + half) / (1 + Z * Z / count)


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    """Train the recipe with seed 3 on a tiny model with random weights: two epochs, three held-out problems."""
    folder = tmp_path_factory.mktemp("smollm2")
    train_smollm2.train(train_recipes.tiny_language(folder / "model"), 3, folder / "runs", [
        "--train.epochs=2", "--train.prompts=2", "--train.group=2", "--eval.prompts=3", "--eval.grid=1"])
    return folder / "runs"


def test_the_table_the_curve_and_the_numbers_are_of_every_finished_run(output, tmp_path, monkeypatch, capsys):
    files = {kind: tmp_path / f"curve.{kind}" for kind in ("png", "json")}
    monkeypatch.setattr(sys, "argv", ["x", "model", f"--output={output}", "--table",
                                      *(f"--{kind}={file}" for kind, file in files.items())])
    train_smollm2.main()
    assert capsys.readouterr().out.splitlines()[2].startswith("| 3 | 3 | 0.000 [0.000, ")  # random weights
    row, = json.loads(files["json"].read_text())
    epochs = [json.loads(line) for line in (output / "seed3" / "metrics.jsonl").read_text().splitlines()]
    assert row["seed"] == 3 and len(row["before"]) == len(row["after"]) == 3
    assert row["rewards"] == [each["reward/numeric_match/mean"] for each in epochs if "seconds/rollout" in each]
    assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0 and Image.open(files["png"]).size == (900, 450)


def test_the_table_has_wilsons_intervals():
    line = train_smollm2.table([{"seed": 0, "before": [0, 0, 0, 1], "after": [0, 1, 1, 1]}]).splitlines()[2]
    seed, count, before, after, change = line.split(" | ")
    assert (seed, count) == ("| 0", "4") and change.startswith("+0.500 [")
    assert before == "0.250 [{:.3f}, {:.3f}]".format(*wilson(1, 4))
    assert after == "0.750 [{:.3f}, {:.3f}]".format(*wilson(3, 4))


def test_a_finished_seed_is_not_trained_again(output):
    before = {file: file.stat().st_mtime_ns for file in output.rglob("*")}
    train_smollm2.train(output / "no model", 3, output, [])
    assert {file: file.stat().st_mtime_ns for file in output.rglob("*")} == before
