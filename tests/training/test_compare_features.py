"""Comparison of two versions of the package by their features: what is said of each, and the exit code."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "measure"))

import compare_features  # noqa: E402
from compare_features import compare, difference  # noqa: E402

ONE = {"weights": "a1", "metrics": [{"loss": 1.0, "kl": float("nan")}, {"loss": 2.0}]}


@pytest.mark.parametrize("before, after, told", [
    (ONE, ONE, ""),
    (ONE, ONE | {"weights": "b2"}, "weights"),
    (ONE, ONE | {"metrics": [{"loss": 1.5}, {"loss": 3.0}]}, "epoch 1: loss 1.0 -> 1.5, kl nan -> None"),
    (ONE, {"weights": "b2", "metrics": [ONE["metrics"][0], {"loss": 2.0, "new": 1}]},
     "weights; epoch 2: new None -> 1"),
    (ONE, ONE | {"metrics": ONE["metrics"][:1]}, "2 epochs -> 1"),
    (ONE, {"error": "KeyError: 'x'"}, "no error -> KeyError: 'x'"),
    ({"error": "KeyError: 'x'"}, {"error": "KeyError: 'x'"}, ""),
    (None, ONE, "new: it is not in the file"), (ONE, None, "gone: it is in the file alone")])
def test_a_difference_in_words(before, after, told):
    assert difference(before, after) == told


def test_the_exit_code_and_a_line_per_feature(capsys):
    assert compare({"text hints": ONE}, {"text hints": ONE}) == 0
    assert compare({"text hints": ONE}, {"text hints": ONE, "text limit": ONE}) == 1
    lines = [line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines()]
    assert lines == [["hints", "equal"], ["equal,", "0 different"], ["hints", "equal"],
                     ["limit", "new: it is not in the file"], ["equal,", "1 different"]]


def test_a_tree_without_the_package_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare_features.py", "--save", str(tmp_path / "f.json"), "--tree",
                                      str(tmp_path)])
    with pytest.raises(SystemExit, match="has no package flowgrpo"):
        compare_features.main()
    assert not (tmp_path / "f.json").exists()
