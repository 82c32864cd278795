"""Large checkpoints are written by a thread: the same files as at once, and nothing is lost when it is disturbed."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

import pytest

from flowgrpo.cli import main
from flowgrpo.storage import atomic, checkpoint, paths
from flowgrpo.storage.places import checkpoints
from flowgrpo.training import epochs, state
from flowgrpo.training.endings import save_on_stop
from tests.helpers import tiny
from tests.helpers.forked import Forked
from tests.training.test_resume import arguments, assert_same, lines

FSYNC = os.fsync


def in_the_thread() -> bool:
    return threading.current_thread().name == atomic.NAME


@pytest.fixture
def large(monkeypatch):
    """Every checkpoint counts as a large one."""
    monkeypatch.setattr(epochs, "LARGE", 0)


@pytest.fixture
def held(monkeypatch):
    """Event for which the first fsync of the thread waits."""
    event = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda file: (in_the_thread() and event.wait(60), FSYNC(file))[1])
    yield event
    event.set()


def full(file: int) -> None:
    """fsync on a disk that is full, for the thread alone."""
    if in_the_thread():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    FSYNC(file)


def trained(tmp_path, **options):
    trainer = tiny.trainer(output=tmp_path, train__ema=0.9, train__epochs=9, **options)
    trainer.run_epoch()
    trainer.epoch, trainer.progress.saved_counters = 1, state.counters(trainer) | {"epoch": 1}
    return trainer


def content(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tiny.sd3(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def uninterrupted(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert main(arguments(model, folder)) == 0
    return folder / "run"


def test_the_files_are_those_of_the_moment_though_training_goes_on(large, held, tmp_path):
    trainer = trained(tmp_path)
    state.save(trainer, tmp_path / "at once")
    trainer.progress.saving(tmp_path / "later", last=False)
    trainer.run_epoch()
    trainer.progress.saved_counters["memory"]["kl"] = "changed"
    trainer.progress.saving.look()
    assert trainer.progress.saving.writer.busy and checkpoints(tmp_path / "later" / "checkpoints") == {}
    held.set()
    trainer.progress.saving.look(wait=True)
    later, at_once = (content(tmp_path / name / "checkpoints" / "epoch-00001") for name in ("later", "at once"))
    assert later == at_once and checkpoint.damage(tmp_path / "later" / "checkpoints" / "epoch-00001") is None


def test_the_next_checkpoint_waits_for_the_one_before(large, held, tmp_path):
    trainer = trained(tmp_path)
    trainer.progress.saving(tmp_path, last=False)
    trainer.epoch, trainer.progress.saved_counters = 2, trainer.progress.saved_counters | {"epoch": 2}
    threading.Timer(0.2, held.set).start()
    trainer.progress.saving(tmp_path, last=True)
    assert [*checkpoints(tmp_path / "checkpoints")] == [1, 2] and not trainer.progress.saving.writer.busy


@pytest.mark.parametrize("size, free, later", [(None, 2**40, False), (0, 2**40, True), (0, 1000, False)])
def test_small_ones_and_those_that_memory_has_no_room_for_are_written_at_once(size, free, later, tmp_path, monkeypatch):
    trainer = trained(tmp_path)
    monkeypatch.setattr(epochs, "unused_memory", lambda: free)
    if size is not None:
        monkeypatch.setattr(epochs, "LARGE", size)
    names = []
    monkeypatch.setattr(os, "fsync", lambda file: (names.append(threading.current_thread().name), FSYNC(file))[1])
    trainer.progress.saving(tmp_path, last=False)
    trainer.progress.saving.look(wait=True)
    assert (atomic.NAME in names) is later and [*checkpoints(tmp_path / "checkpoints")] == [1]


def test_a_write_that_fails_is_raised_at_the_next_look(large, tmp_path, monkeypatch):
    trainer = trained(tmp_path)
    state.save(trainer, tmp_path)
    before = content(tmp_path / "checkpoints" / "epoch-00001")
    trainer.epoch = 2
    monkeypatch.setattr(os, "fsync", full)
    trainer.progress.saving(tmp_path, last=False)
    while trainer.progress.saving.writer.busy:
        time.sleep(0.01)
    with pytest.raises(OSError, match="No space left") as caught:
        trainer.progress.saving.look()
    assert paths.refusal(caught.value).startswith("a file cannot be written whole (No space left on device)")
    assert [*checkpoints(tmp_path / "checkpoints")] == [1] and content(
        tmp_path / "checkpoints" / "epoch-00001") == before
    trainer.progress.saving.look(wait=True)  # reported once


def test_an_error_of_the_run_waits_for_the_write(large, held, tmp_path, monkeypatch, capsys):
    trainer = trained(tmp_path)
    with pytest.raises(ZeroDivisionError), save_on_stop(trainer, tmp_path):
        trainer.progress.saving(tmp_path, last=False)
        threading.Timer(0.2, held.set).start()
        raise ZeroDivisionError
    assert [*checkpoints(tmp_path / "checkpoints")] == [1]
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ZeroDivisionError), save_on_stop(trainer, tmp_path):
        trainer.progress.saving(tmp_path, last=False)
        raise ZeroDivisionError
    assert capsys.readouterr().out == (
        "a checkpoint could not be written: OSError: [Errno 28] No space left on device\n")


def test_a_second_signal_does_not_wait(large, held, tmp_path):
    trainer = trained(tmp_path)
    with pytest.raises(KeyboardInterrupt), save_on_stop(trainer, tmp_path):
        trainer.progress.saving(tmp_path, last=False)
        raise KeyboardInterrupt
    assert trainer.progress.saving.writer.busy and checkpoints(tmp_path / "checkpoints") == {}
    held.set()
    trainer.progress.saving.look(wait=True)


def test_a_stop_of_a_run(large, model, uninterrupted, tmp_path):
    """In the fourth epoch, as in test_resume.py, with checkpoints of every second epoch."""
    command = arguments(model, tmp_path)
    (tmp_path / "plan").write_text(f"9 {int(signal.SIGTERM)}")
    assert main(command) == 130
    last = lines(tmp_path / "run")[-1]["epoch"]
    assert [*checkpoints(tmp_path / "run" / "checkpoints")][-1] == last
    assert main([*command, "--resume"]) == 0
    assert_same(tmp_path / "run", uninterrupted)


def dying(command: list[str]) -> int:
    """A run whose process is killed while the thread writes its second checkpoint."""
    epochs.LARGE, calls = 0, []
    def fsync(file: int) -> None:
        if in_the_thread():
            calls.append(file)
            if ".epoch-00004.tmp" in os.readlink(f"/proc/self/fd/{file}"):
                os.kill(os.getpid(), signal.SIGKILL)
        FSYNC(file)
    os.fsync = fsync
    return main(command)


def test_a_kill_in_between_leaves_the_checkpoint_before(model, uninterrupted, tmp_path):
    command = arguments(model, tmp_path)
    killed = Forked(dying, command)
    assert killed.wait() == -signal.SIGKILL, killed.streams()
    place = tmp_path / "run" / "checkpoints"
    assert [*checkpoints(place)] == [2] and (place / ".epoch-00004.tmp").is_dir()
    assert main([*command, "--resume"]) == 0
    assert_same(tmp_path / "run", uninterrupted)


def test_a_full_disk_ends_a_run_in_one_line(large, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "fsync", full)
    assert main(arguments(model, tmp_path)) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "a file cannot be written whole (No space left on device): make room for it" in line
    assert checkpoints(tmp_path / "run" / "checkpoints") == {}
