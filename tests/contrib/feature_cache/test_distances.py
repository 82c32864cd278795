"""Table of docs/performance.md: from its JSON, and by the script that measures it."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "measure"))

import feature_caches  # noqa: E402


def test_the_page_has_the_table_of_the_numbers():
    found, text = json.loads(feature_caches.DATA.read_text()), feature_caches.PAGE.read_text()
    assert feature_caches.page(text, found) == text
    assert found["seeds"] == 3 and all(len(each["distances"]) == 3 for each in found["rows"])


def test_a_row_has_the_mean_and_the_largest_distance():
    rows = [{"cache": "mag", "cache_threshold": 0.1, "skipped": 0.25, "distances": [0.1, 0.3, 0.2]},
            {"cache": "taylorseer", "cache_interval": 3, "skipped": 0.5, "distances": [0.0, 0.0, 0.0]}]
    assert feature_caches.table({"rows": rows}).splitlines()[2:] == [
        "| `mag` | `cache_threshold: 0.1` | 25% | 0.200 | 0.300 |",
        "| `taylorseer` | `cache_interval: 3` | 50% | 0.000 | 0.000 |"]


def test_the_distance_is_a_root_mean_square():
    assert feature_caches.distance(torch.tensor([1.0, 2.0]), torch.tensor([4.0, -2.0])) == pytest.approx(12.5**0.5)


def test_the_script_prints_a_table_of_a_recipe(monkeypatch, capsys):
    monkeypatch.setattr(feature_caches, "CASES", [{"cache": "first_block", "cache_threshold": 1e9}])
    monkeypatch.setattr(sys, "argv", ["feature_caches.py", "--repetitions", "1", "--write", "", "--option",
                                      "train.steps=3"])
    feature_caches.main()
    # Of 5 blocks all behind the first, at two of three steps: 8 of 15.
    assert "| `first_block` | `cache_threshold: 1e+09` | 53% | " in capsys.readouterr().out
