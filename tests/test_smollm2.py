"""The table and the curve of the language model's runs (scripts/train_smollm2.py)."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import train_smollm2  # noqa: E402

Z = 1.959963984540054


def wilson(right: int, count: int) -> tuple[float, float]:
    """Wilson's limits of a share."""
    share = right / count
    middle, half = share + Z * Z / 2 / count, Z * math.sqrt(share * (1 - share) / count + Z * Z / 4 / count**2)
    return (middle - half) / (1 + Z * Z / count), (middle + half) / (1 + Z * Z / count)


def finished(folder: Path, seed: int, before: list[float], after: list[float]) -> Path:
    """Write the files of a finished run that the table reads."""
    run = folder / f"seed{seed}"
    run.mkdir()
    (run / "summary.json").write_text("{}")
    for side, scores in (("before", before), ("after", after)):
        (run / f"{side}.json").write_text(json.dumps({"scores": {"numeric_match": scores}}))
    lines = [{"epoch": epoch, "reward/numeric_match/mean": epoch / 4, "seconds/rollout": 2.0, "seconds/update": 1.0}
             for epoch in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"held_out": 1.0}]))
    return run


def test_the_table_has_wilsons_intervals_and_the_curve_every_seed(tmp_path, monkeypatch, capsys):
    finished(tmp_path, 0, [0, 0, 0, 1], [0, 1, 1, 1])
    finished(tmp_path, 3, [0, 0, 0, 0], [0, 0, 1, 1])
    monkeypatch.setattr(sys, "argv", ["x", "model", f"--output={tmp_path}", "--table", f"--png={tmp_path / 'c.png'}",
                                      f"--json={tmp_path / 'c.json'}"])
    train_smollm2.main()
    first, second = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert first[:2] == ["| 0", "4"] and second[:2] == ["| 3", "4"]
    assert first[2] == "0.250 [{:.3f}, {:.3f}]".format(*wilson(1, 4))
    assert second[3] == "0.500 [{:.3f}, {:.3f}]".format(*wilson(2, 4))
    assert first[4].startswith("+0.500 [")
    rows = json.loads((tmp_path / "c.json").read_text())
    assert [row["seed"] for row in rows] == [0, 3] and rows[0]["rewards"] == [0.25, 0.5]
    assert rows[0]["seconds"] == [3.0, 3.0] and Image.open(tmp_path / "c.png").size == (900, 450)


def test_a_finished_seed_is_not_trained_again(tmp_path):
    run = finished(tmp_path, 1, [0], [1])
    train_smollm2.train(tmp_path / "no model", 1, tmp_path, [])
    assert sorted(file.name for file in run.iterdir()) == ["after.json", "before.json", "metrics.jsonl", "summary.json"]
