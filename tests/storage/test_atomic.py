"""Atomic writes: the new content, or the earlier one, and nothing beside it."""

import re
from pathlib import Path

import pytest

from flowgrpo.storage import atomic

PACKAGE = Path(__file__).parents[2] / "flowgrpo"
WRITE = re.compile(r"(?<!atomic)\.write_(?:text|bytes)\(|open\([^()]*[\"'][wx]b?[\"']|\.savefig\(|shutil\.copy")
TEMPORARY = {  # files in a folder that is deleted afterwards, or under a name that `atomic` gave
    "tools/check/tiny/unets.py", "policies/checkpoints.py", "evaluation/pages/figures.py",
    "text/rewards/sandbox/run.py", "data/sources.py", "contrib/vbench/vbench_child.py",
    "contrib/vbench/dimensions.py", "storage/atomic.py", "storage/manifest.py", "training/metrics.py"}


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "new" / "a.json"
    atomic.write_text(path, "one")
    with pytest.raises(OSError, match="full"), atomic.replacing(path) as file:
        file.write_text("tw")
        raise OSError("full")
    assert path.read_text() == "one" and list(path.parent.iterdir()) == [path]
    atomic.write_text(path, "two", shared=True)
    assert path.read_text() == "two" and list(path.parent.iterdir()) == [path]


def test_lines_are_whole(tmp_path):
    path = tmp_path / "lines"
    atomic.append_line(path, "1")
    with path.open("a") as file:
        file.write("cut")
    atomic.append_line(path, "2")
    assert path.read_text() == "1\ncut\n2\n"


def test_files_of_a_folder_take_their_places_together(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a").write_text("old")
    (tmp_path / "other").write_text("stays")
    with pytest.raises(RuntimeError), atomic.filling(tmp_path) as place:
        (place / "other").write_text("lost")
        raise RuntimeError
    with atomic.filling(tmp_path) as place:
        (place / "inner").mkdir()
        (place / "inner" / "a").write_text("new")
        (place / "b").write_text("new too")
    content = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert content == {"inner/a": "new", "b": "new too", "other": "stays"}


def test_a_folder_is_removed(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    atomic.remove(tmp_path / "a")
    atomic.remove(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fast
def test_no_module_writes_a_file_in_place():
    """Whatever is written elsewhere can be cut off by a kill."""
    writing = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if WRITE.search(file.read_text())}
    assert writing == TEMPORARY
