"""JSON files that are damaged: one line, whoever reads them."""

import json
import os
from pathlib import Path

import pytest

from flowgrpo.config import yaml_text
from flowgrpo.errors import UserError
from flowgrpo.files import text_of
from flowgrpo.storage import manifest
from flowgrpo.storage.json_files import read_lines, read_object

MEMORY = Path("/proc/self/mem")
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


@pytest.mark.parametrize("line, why", [
    ('{"epoch": 2, "loss": NaN}', "NaN is no number of JSON"), ('{"epoch": 2, "loss": -1e999}', "-1e999 is no number"),
    ('{"epoch": 2, "reward/scene/mean": "high"}', "reward/scene/mean is 'high', expected a number"),
    ('{"epoch": "2"}', "expected an object with numbers under epoch")])
def test_a_line_with_other_values_is_named(line, why, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"epoch": 1, "reward/scene/mean": null}\n' + line + "\n")
    with pytest.raises(UserError, match="a.jsonl, line 2: damaged") as caught:
        read_lines(tmp_path / "a.jsonl", "epoch")
    assert why in str(caught.value)


def test_an_object_with_nan_is_named(tmp_path):
    (tmp_path / "a.json").write_text('{"before": {"scene": NaN}}')
    with pytest.raises(UserError, match=r"a.json is damaged \(NaN is no number of JSON\): remove it"):
        read_object(tmp_path / "a.json", "remove it")


def test_files_that_the_disk_does_not_give_are_named():
    """/proc/self/mem is a regular file of which a read fails (EIO)."""
    for read in (lambda: read_object(MEMORY, "remove it"), lambda: read_lines(MEMORY), lambda: text_of(MEMORY),
                 lambda: yaml_text.read(MEMORY)):
        with pytest.raises(UserError, match="/proc/self/mem cannot be read [(]Input/output error[)]"):
            read()


def test_a_deep_manifest_is_damaged(tmp_path):
    (tmp_path / manifest.MANIFEST).write_text(DEEP)
    assert manifest.difference(tmp_path) == "manifest.json cannot be read (RecursionError)"
