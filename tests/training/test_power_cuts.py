"""Runs go on after a power cut as if nothing had happened; the long form is scripts/fuzz/try_power_cuts.py."""

import random
import sys
from pathlib import Path

import pytest

from flowgrpo.storage import atomic
from flowgrpo.training import state

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "fuzz"))
from power_cuts import Recorder, build
from try_power_cuts import cut, prepare, recorded


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_cut_loses_what_was_not_forced_to_the_disk(tmp_path):
    """The simulation has teeth: a plain write and rename may leave an empty file, an atomic one may not."""
    folder = tmp_path / "run"
    folder.mkdir()
    recorder, root = Recorder(folder), folder.stat().st_ino
    with recorder.recording():
        atomic.write_text(folder / "a", "earlier")
        (folder / ".b.tmp").write_text("plain")
        (folder / ".b.tmp").replace(folder / "b")
        (folder / "c").mkdir()
        atomic.sync(folder)
        atomic.write_text(folder / "a", "later")
        (folder / "c" / "d").write_text("plain")
        (folder / "c" / "d").replace(folder / "c" / "e")
    build(recorder.moments[-1], root, tmp_path / "cut")
    assert content(tmp_path / "cut") == {"a": b"later", "b": b""} and (tmp_path / "cut" / "c").is_dir()
    states = set()
    for seed in range(200):
        moment = recorder.moments[random.Random(seed).randrange(len(recorder.moments))]
        build(moment, root, tmp_path / str(seed), random.Random(seed))
        state = content(tmp_path / str(seed))
        assert state.get("a") in (None, b"earlier", b"later")
        states |= {(name, value) for name, value in state.items() if name == "b"}
    assert {("b", b""), ("b", b"plain"[:2]), ("b", b"plain")} <= states


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A recorded run: (its recorder, the inode of its output, the arguments, the output)."""
    base = tmp_path_factory.mktemp("whole")
    arguments = prepare(base, "plain")
    return *recorded(arguments, base / "output"), arguments, base / "output"


@pytest.fixture(scope="module")
def by_threads(tmp_path_factory):
    """A recorded run whose checkpoints are written by a thread."""
    base = tmp_path_factory.mktemp("threads")
    arguments = prepare(base, "plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "LARGE", 0)
        return *recorded(arguments, base / "output"), arguments, base / "output"


def test_every_file_of_a_finished_run_is_on_the_disk(whole, tmp_path):
    recorder, root, _, output = whole
    build(recorder.moments[-1], root, tmp_path / "cut")
    kept, expected = content(tmp_path / "cut"), content(output)
    assert {name for name in expected if not name.endswith(".lock")} <= set(kept)
    assert {name for name, value in kept.items() if value != expected.get(name)} == set()


@pytest.mark.parametrize("share", [0.1, 0.35, 0.5, 0.65, 0.8, 0.95])
def test_after_a_power_cut(whole, tmp_path, share):
    recorder, root, arguments, output = whole
    chance = random.Random(int(100 * share)) if share > 0.5 else None
    index = int(share * len(recorder.moments))
    assert cut(recorder, root, index, arguments, tmp_path / "cut", output / "run", chance) == ""


@pytest.mark.parametrize("share", [0.4, 0.6, 0.7])
def test_after_a_power_cut_while_a_thread_writes(by_threads, tmp_path, share):
    recorder, root, arguments, output = by_threads
    index = int(share * len(recorder.moments))
    assert cut(recorder, root, index, arguments, tmp_path / "cut", output / "run", random.Random(index)) == ""
