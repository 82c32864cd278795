"""Files that are whole or not written: atomic writes, JSON, and output paths."""

import contextlib
import json
import os
import re
import resource
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from flowgrpo.cli import main
from flowgrpo.config import yaml_text
from flowgrpo.errors import UserError
from flowgrpo.evaluation.report import snapshots
from flowgrpo.files import text_of
from flowgrpo.storage import atomic, checkpoint, manifest, paths
from flowgrpo.storage.json_files import read_lines, read_object
from flowgrpo.tools.check.tiny import make
from flowgrpo.training.metrics import Log
from tests.export.test_export import make_run
from tests.helpers import tiny
from tests.helpers.refusals import error_line, refused

PACKAGE = Path(__file__).parents[2] / "flowgrpo"
WRITE = re.compile(r"(?<!atomic)\.write_(?:text|bytes)\(|open\([^()]*[\"'][wx]b?[\"']|\.savefig\(|shutil\.copy")
TEMPORARY = {  # files in a folder that is deleted afterwards, or under a name that `atomic` gave
    "tools/check/tiny/unets.py", "policies/checkpoints.py", "evaluation/pages/figures.py",
    "text/rewards/sandbox/run.py", "data/sources.py", "contrib/vbench/vbench_child.py",
    "contrib/vbench/dimensions.py", "storage/atomic.py", "storage/manifest.py", "training/metrics.py",
    "distributed/launchers.py", "trust.py"}


def test_failed_writes_and_lines_are_whole(tmp_path):
    path = tmp_path / "new" / "a.json"
    atomic.write_text(path, "one")
    with pytest.raises(OSError, match="full"), atomic.replacing(path) as file:
        file.write_text("tw")
        raise OSError("full")
    assert path.read_text() == "one" and list(path.parent.iterdir()) == [path]
    atomic.write_text(path, "two", shared=True)
    assert path.read_text() == "two" and list(path.parent.iterdir()) == [path]
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


@pytest.mark.fast
def test_folders_are_removed_and_no_module_writes_in_place(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    atomic.remove(tmp_path / "a")
    atomic.remove(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    # Whatever is written elsewhere can be cut off by a kill.
    writing = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if WRITE.search(file.read_text())}
    assert writing == TEMPORARY


MEMORY = Path("/proc/self/mem")
DEEP = "[" * 100_000


@pytest.mark.parametrize("text", [DEEP, '{"a": ' * 100_000, "{", "3", '{"a": 1}', "\udcff"])
def test_a_damaged_object_is_told_in_one_line(text, tmp_path):
    (tmp_path / "a.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"a.json is damaged \(.*\): remove it") as caught:
        read_object(tmp_path / "a.json", "remove it", a=str)
    assert "\n" not in str(caught.value)


def test_fifos_and_deep_lines(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(UserError, match=r"a.json is damaged \(it is a FIFO, expected a regular file\): remove it"):
        read_object(tmp_path / "a.json", "remove it")
    (tmp_path / "a.jsonl").write_text(json.dumps({"epoch": 1}) + f"\n{DEEP}\n")
    refused("a.jsonl, line 2: damaged .*: remove that line", read_lines, tmp_path / "a.jsonl", "epoch")


def test_nan_missing_files_and_deep_manifests(tmp_path):
    (tmp_path / "a.json").write_text('{"before": {"scene": NaN}}')
    refused(r"a.json is damaged \(NaN is no number of JSON\): remove it", read_object, tmp_path / "a.json", "remove it")
    # /proc/self/mem is a regular file of which a read fails (EIO).
    for read in (lambda: read_object(MEMORY, "remove it"), lambda: read_lines(MEMORY), lambda: text_of(MEMORY),
                 lambda: yaml_text.read(MEMORY)):
        refused("/proc/self/mem cannot be read [(]Input/output error[)]", read)
    (tmp_path / manifest.MANIFEST).write_text(DEEP)
    assert manifest.difference(tmp_path) == "manifest.json cannot be read (RecursionError)"


@pytest.mark.parametrize("line, why", [
    ('{"epoch": 2, "loss": NaN}', "NaN is no number of JSON"), ('{"epoch": 2, "loss": -1e999}', "-1e999 is no number"),
    ('{"epoch": 2, "reward/scene/mean": "high"}', "reward/scene/mean is 'high', expected a number"),
    ('{"epoch": "2"}', "expected an object with numbers under epoch")])
def test_a_line_with_other_values_is_named(line, why, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"epoch": 1, "reward/scene/mean": null}\n' + line + "\n")
    with pytest.raises(UserError, match="a.jsonl, line 2: damaged") as caught:
        read_lines(tmp_path / "a.jsonl", "epoch")
    assert why in str(caught.value)


RECIPE = Path(__file__).parents[2] / "configs" / "starter.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run whose model is gone: whatever would load it fails otherwise than the tests expect."""
    folder = make_run(tmp_path_factory.mktemp("run"), tiny.sd3(), tiny.CALL)
    (folder / "model" / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    return folder


@pytest.fixture
def file(tmp_path):
    (tmp_path / "file").write_text("mine")
    return tmp_path / "file"


def test_places_that_can_be_written_are_left_as_they_were(tmp_path, file):
    paths.require_folder(tmp_path / "new" / "deep")
    paths.require_folder(tmp_path)
    paths.require_file(tmp_path / "new" / "page.png")
    before = file.stat().st_mtime_ns
    paths.require_file(file)
    assert os.listdir(tmp_path) == ["file"] and file.read_text() == "mine" and file.stat().st_mtime_ns == before


@pytest.mark.parametrize("require, name, why", [
    (paths.require_folder, "file", "File exists"), (paths.require_folder, "file/x", "Not a directory"),
    (paths.require_file, "file/x.png", "Not a directory|File exists"), (paths.require_file, "folder", "Is a directory"),
    (paths.require_folder, "/proc/nowhere/x", "No such file"), (paths.require_file, "/proc/nowhere/x", "No such file")])
def test_places_that_cannot_be_written(require, name, why, tmp_path, file):
    (tmp_path / "folder").mkdir()
    refused(rf"{name} cannot be written \(({why})", require, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


GRID = ["compare", "grid", "{run}"]


@pytest.mark.parametrize("command, place", [
    (["train", str(RECIPE), "--model=nowhere/to/be/found", "--device=cpu"], "{file}/x"),
    *((["export", "{run}", "--form", form], place) for form in ("kohya", "merged")
      for place in ("{file}/x", "/proc/nowhere/x")),
    (["sample", "nowhere", "--prompt", "a cat"], "{file}"), (["sample", "{run}", "--prompts", "{file}"], "{file}"),
    (["eval", "{run}", "--suite", "starter", "--rewards", "scene"], "{file}"),
    *(([*GRID, *options], place) for options in ([], ["--columns", "guidance", "--values", "1,2"])
      for place in ("{file}/grid.png", "{folder}"))])
def test_places_are_tried_before_the_model_is_loaded(command, place, run, file, capsys):
    *command, place = (part.format(run=run, file=file, folder=file.parent) for part in (*command, place))
    assert re.search(f"{place}(/\\S+)? cannot be written", error_line(capsys, *command, "--output", place))


def test_what_the_disk_refuses_later_is_one_line_too(run, capsys):
    (run / "README.md").mkdir()
    line = error_line(capsys, "export", run, "--form", "card")
    assert line == f"flowgrpo: error: {run / 'README.md'}: Is a directory"


@contextlib.contextmanager
def full_disk():
    """No file may grow beyond 512 bytes: a disk that is full, which says EFBIG for ENOSPC.

    No fixture: pytest would write a result into its own output file before the fixture ends.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("write", [
    lambda folder: snapshots.write(folder / "x.json", ["x" * 600]),
    lambda folder: Log(folder, SimpleNamespace(is_main_process=True), 1, 0).epoch(1, {"x": "x" * 9000}, {}),
    lambda folder: checkpoint.save(folder, 1, {"x": torch.ones(600)}, {}, 1),
    lambda folder: tiny.policy().weights.save(folder)])
def test_a_full_disk_is_told(write, tmp_path, capsys):
    with pytest.raises(Exception) as caught, full_disk():
        write(tmp_path)
    assert paths.refusal(caught.value).startswith("a file cannot be written whole (File too large): make room")


@pytest.mark.parametrize("form", ["card", "kohya"])
def test_a_full_disk_is_one_line(form, tmp_path, capsys):
    made = make_run(tmp_path / "run", tiny.sd3(), tiny.CALL)
    output = ["--output", tmp_path / "x.safetensors"] if form == "kohya" else []
    with full_disk():
        said = error_line(capsys, "export", made, "--form", form, *output)
    assert "a file cannot be written whole (File too large): make room" in said


@pytest.mark.parametrize("error", [ConnectionError(111, "refused"), ValueError("os error 28"), KeyError("x")])
def test_other_errors_are_not_the_disks(error):
    assert paths.refusal(error) is None


@pytest.fixture(params=[0o022, 0o007])
def mask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> set[int]:
    found = {stat.S_IMODE(file.stat().st_mode) for file in folder.rglob("*") if file.is_file()}
    assert found
    return found


def test_safetensors_files_get_the_mode_of_every_other_file(mask, tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "alone.safetensors")
    paths.readable(tmp_path / "alone.safetensors")
    (tmp_path / "other").touch()
    assert modes(tmp_path) == {stat.S_IMODE((tmp_path / "other").stat().st_mode)} == {0o666 & ~mask}


@pytest.mark.parametrize("name, rank", [("StableDiffusion3Pipeline", 2), ("StableDiffusion3Pipeline", 0),
                                        ("PixArtSigmaPipeline", 2), ("WanPipeline (2.2)", 2)])
def test_the_weights_of_a_run_can_be_read_by_others(name, rank, mask, tmp_path):
    pipe, call = make(name)
    tiny.policy(pipe, rank, call=call).weights.save(tmp_path)
    checkpoint.save(tmp_path / "checkpoints", 1, {"x": torch.ones(1)}, {}, 1)
    assert modes(tmp_path) == {0o666 & ~mask}


@pytest.mark.parametrize("form", ["kohya", "merged"])
def test_so_can_what_is_exported(form, mask, tmp_path, capsys):
    run = make_run(tmp_path / "run", tiny.sd3(), tiny.CALL)
    assert main(["export", str(run), "--form", form, "--output", str(tmp_path / "out" / "x")]) == 0
    assert modes(tmp_path / "out") == {0o666 & ~mask}
