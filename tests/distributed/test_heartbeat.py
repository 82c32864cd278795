"""A process that hangs or fails ends the others within a bound, with its reason; a stop of one is one of all."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from accelerate import Accelerator

from flowgrpo.cli import main
from flowgrpo.distributed import signals
from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.watch import Watch
from flowgrpo.storage import checkpoint
from tests.helpers import tiny_runs
from tests.helpers.processes import launch
from tests.helpers.refusals import refused

REWARD = '''
import os
import signal
import time
from pathlib import Path

def red(images, prompts):
    """Hang on the second process when the checkpoint of the first epoch is there; the first one may get a signal."""
    here = Path(__file__).parent
    if not list(here.glob("run/checkpoints/epoch-00001")):
        return images[:, 0].mean((1, 2))
    if os.environ["RANK"] == "0" and (here / "signal").exists():
        (here / "signal").unlink()
        os.kill(os.getpid(), signal.SIGTERM)
    if os.environ["RANK"] == "1":
        time.sleep(600)
    return images[:, 0].mean((1, 2))
'''


def hangs(folder: Path, kind: str) -> int:
    """Hold the second process's interpreter, or fail there, while the first never comes to meet it."""
    processes = Processes(Accelerator(cpu=True))
    with Watch(processes, grace=0.5, silence=1.5, failed=1.0), processes.collective():
        if processes.rank and kind == "fails":
            raise ValueError("singular")
        if processes.rank:
            ctypes.PyDLL(None).usleep(4_000_000)
        time.sleep(600)
    return 0


@pytest.mark.parametrize("kind, reason", [
    ("holds", "has sent nothing for 1.5 s"), ("fails", "failed (ValueError: singular)")])
def test_the_reason_of_a_process_that_hangs_or_fails_ends_all(kind, reason, tmp_path):
    for code, said in launch(hangs, 2, tmp_path, kind, timeout=60):
        [line] = [line for line in said.splitlines() if "flowgrpo: error:" in line]
        assert code == 2 and "process 1 on " in line and reason in line


class Paused(Watch):
    """Watch whose process stands still for 4 s between reading what was sent and looking at the time."""

    paused = False

    def _hear(self, link, name, said):
        goes_on = super()._hear(link, name, said)
        if self.processes.rank and not self.paused:
            self.paused = True
            ctypes.PyDLL(None).usleep(4_000_000)
        return goes_on


def pauses(folder: Path) -> int:
    """Stand still on the second process, which alone has a short patience."""
    processes = Processes(Accelerator(cpu=True))
    with Paused(processes, grace=0.5, silence=1.5 if processes.rank else 60.0), processes.collective():
        time.sleep(8)
    return 0


def test_a_process_does_not_call_the_others_silent_after_a_pause_of_its_own(tmp_path):
    assert [code for code, _ in launch(pauses, 2, tmp_path, timeout=60)] == [0, 0]


def waits(folder: Path) -> int:
    """Get a signal on the second process alone, while the first waits for a reward."""
    processes, stop = Processes(Accelerator(cpu=True)), signals.Stop()
    try:
        with Watch(processes), stop, processes.collective():
            if processes.rank:
                os.kill(os.getpid(), signal.SIGTERM)
            signals.promptly(lambda: time.sleep(600))
    except signals.Stopped:
        return 3
    return 0


def test_a_signal_of_one_process_stops_all(tmp_path):
    assert [code for code, _ in launch(waits, 2, tmp_path, timeout=60)] == [3, 3]


def signalled(folder: Path) -> int:
    """Save while the process gets SIGTERM three times, as from Slurm, and from torch's launcher as it ends."""
    processes, stop = Processes(Accelerator(cpu=True)), signals.Stop()
    def send() -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.15)
    try:
        with Watch(processes), stop:
            threading.Thread(target=send).start()
            try:
                with processes.collective():
                    signals.promptly(lambda: time.sleep(600))
            except signals.Stopped:
                time.sleep(0.2)
                (folder / f"saved {processes.rank}").touch()
                raise
    except signals.Stopped:
        time.sleep(0.3)  # logs are closed
        return signals.exit_code()
    return 0


def test_signals_that_are_one_stop_let_all_processes_save(tmp_path):
    assert [code for code, _ in launch(signalled, 2, tmp_path, timeout=60)] == [130, 130]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["saved 0", "saved 1"]


# --- a run -----------------------------------------------------------------------------------------------------------
def run(folder: Path) -> int:
    signals.PATIENCE = 5.0
    return main(["train", "--trust", str(folder / "recipe.yaml")])


@pytest.fixture
def folder(model, tmp_path):
    tiny_runs.command(model, tmp_path, REWARD, method="flow_grpo", train__epochs=9, train__save_every=1, train__steps=3,
                      train__prompts=2, train__group=2, train__micro_batch=2, eval__prompts=1)
    return tmp_path


@pytest.mark.parametrize("stopped, codes, reason", [
    (False, [130, 2], "a reward hangs: no answer within 5 s, for which the other processes wait: set the reward's"),
    (True, [130, 130], "")])
def test_a_reward_that_hangs_on_one_process(stopped, codes, reason, folder):
    """Without a signal its limit ends the run; a signal to the other process stops both."""
    if stopped:
        (folder / "signal").touch()
    ended = launch(run, 2, folder, timeout=120)
    assert [code for code, _ in ended] == codes and reason in ended[1][1], ended
    _, state = checkpoint.load(checkpoint.latest(folder / "run" / "checkpoints"))
    assert state["epoch"] >= 1 and not (folder / "signal").exists()


def test_a_limit_is_of_runs_of_several_processes(monkeypatch):
    assert signals.promptly(lambda: time.sleep(0.3) or 5) == 5
    monkeypatch.setattr(signals, "limits", [0.0])
    refused("a reward hangs: no answer within 0 s", signals.promptly, lambda: time.sleep(5))
