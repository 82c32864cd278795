"""JSON files that are damaged: one line, whoever reads them."""

from __future__ import annotations

import json
import os

import pytest

from flowgrpo.errors import UserError
from flowgrpo.storage import manifest
from flowgrpo.storage.json_files import read_lines, read_object

DEEP = "[" * 100_000


@pytest.mark.parametrize("text", [DEEP, '{"a": ' * 100_000, "{", "3", '{"a": 1}', "\udcff"])
def test_a_damaged_object_is_told_in_one_line(text, tmp_path):
    (tmp_path / "a.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"a.json is damaged \(.*\): remove it") as caught:
        read_object(tmp_path / "a.json", "remove it", a=str)
    assert "\n" not in str(caught.value)


def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(UserError, match=r"a.json is damaged \(it is a FIFO, expected a regular file\): remove it"):
        read_object(tmp_path / "a.json", "remove it")


def test_a_deep_line_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"epoch": 1}) + f"\n{DEEP}\n")
    with pytest.raises(UserError, match="a.jsonl, line 2: damaged .*: remove that line"):
        read_lines(tmp_path / "a.jsonl", "epoch")


def test_a_deep_manifest_is_damaged(tmp_path):
    (tmp_path / manifest.MANIFEST).write_text(DEEP)
    assert manifest.difference(tmp_path) == "manifest.json cannot be read (RecursionError)"
