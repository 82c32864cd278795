"""A stop does not wait for a reward: the last whole epoch is saved, and the run goes on from it to the same end."""

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from flowgrpo.cli import main
from flowgrpo.distributed import signals
from flowgrpo.distributed.signals import Stop
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.storage import checkpoint
from tests.helpers import tiny_runs
from tests.helpers.forked import Forked

EPOCHS = 4
REWARD = '''
import time
from pathlib import Path

calls, plan = 0, Path(__file__).with_name("plan")  # the number of the call that never returns

def red(images, prompts):
    global calls
    calls += 1
    if plan.exists() and int(plan.read_text()) == calls:
        plan.unlink()
        Path(__file__).with_name("hanging").touch()
        while True:
            try:
                time.sleep(600)
            except BaseException:
                pass
    return images[:, 0].mean((1, 2))
'''
METHOD = '''
import time
from dataclasses import dataclass
from pathlib import Path

from flowgrpo.advantages.group import Advantage

@dataclass(frozen=True)
class Hanging(Advantage):
    def __call__(self, rewards, weights, context=None):
        if context.run.epoch == 2:
            Path(__file__).with_name("hanging").touch()
            time.sleep(600)
        return super().__call__(rewards, weights, context)

def hanging(method):
    return method.having(advantage=Hanging())
'''


def arguments(model, folder) -> list[str]:
    """A run that is measured after every epoch, keeps its best weights, and is saved every second epoch."""
    return tiny_runs.command(model, folder, REWARD, train__epochs=EPOCHS, train__save_every=2, train__updates=2,
                             train__steps=4, parts__plan__size=2, train__lr=0.02, eval__every=1,
                             eval__best=f"{folder}/reward.py:red")


def heard(command: list[str]) -> int:
    """Run a command that hears a hangup, whatever started the tests."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    return main(command)


def on_a_terminal() -> None:
    """Take the terminal of a new session, and hear its hangup."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def signalled(command, folder, *numbers, timeout=60) -> tuple[int, tuple[str, str]]:
    """The exit code and the streams of a run that gets signals, one every second, once the file `hanging` is there."""
    process = Forked(heard, command)
    until = time.monotonic() + timeout
    try:
        while not (folder / "hanging").exists():
            assert process.process.is_alive() and time.monotonic() < until, process.streams()
            time.sleep(0.05)
        for number in numbers:
            os.kill(process.process.pid, number)
            process.process.join(1)
        return process.wait(timeout), process.streams()
    finally:
        process.kill()


@pytest.fixture(scope="module")
def uninterrupted(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert main(arguments(model, folder)) == 0
    return folder / "run"


# Call 1 is the trial, call 2 measures the base, then come two per epoch and one that measures.
@pytest.mark.parametrize("call, epoch, number, told", [
    (2, 0, signal.SIGINT, "stopped in the first evaluation, epoch 0 is saved in "),
    (9, 2, signal.SIGTERM, "stopped after epoch 2, saved in "),
    (10, 2, signal.SIGINT, "stopped after epoch 2, saved in "),
    (11, 3, signal.SIGTERM, "stopped after epoch 3, saved in "),
    (9, 2, signal.SIGHUP, "stopped after epoch 2, saved in "),
    (9, 2, signal.SIGUSR1, "stopped after epoch 2, saved in "),
    (3 + 3 * EPOCHS, EPOCHS, signal.SIGINT, f"stopped in the last evaluation, epoch {EPOCHS} is saved in ")],
    ids=["base", "first", "second", "evaluation", "hangup", "warning", "last"])
def test_a_reward_that_hangs_does_not_hold_a_stop(call, epoch, number, told, model, uninterrupted, tmp_path):
    command = arguments(model, tmp_path)
    (tmp_path / "plan").write_text(str(call))
    code, (out, err) = signalled(command, tmp_path, number)
    assert code == 130 and err.count("stopping after this step; once more to leave now") == 1
    assert out.splitlines()[-1] == f"{told}{tmp_path / 'run'}; --resume goes on"
    run = tmp_path / "run"
    assert checkpoint.latest(run / "checkpoints").name == f"epoch-{epoch:05d}"
    assert main([*command, "--resume"]) == 0
    for file in (LORA_FILE, f"checkpoints/epoch-{EPOCHS:05d}/state.safetensors"):
        tiny_runs.assert_same_weights(load_file(run / file), load_file(uninterrupted / file))
    found, expected = ([[value for key, value in line.items() if key.startswith("held_out/")]
                        for line in tiny_runs.lines(folder)] for folder in (run, uninterrupted))
    assert all(found) and found == expected
    assert [line["epoch"] for line in tiny_runs.lines(run)] == list(range(1, EPOCHS + 1))


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_at_once_with_the_last_checkpoint(number, code, model, tmp_path):
    """User code in the main thread, which the first one waits for."""
    command = [*arguments(model, tmp_path), f"--method=mix_grpo+{tmp_path}/method.py:hanging"]
    (tmp_path / "method.py").write_text(METHOD)
    assert signalled(command, tmp_path, number, number)[0] == code
    [kept] = (tmp_path / "run" / "checkpoints").iterdir()
    _, state = checkpoint.load(kept)
    assert state["epoch"] == 2


@pytest.fixture
def clock(monkeypatch):
    """The time that signals read, which a test moves; without a launcher. Handlers are put back."""
    for name in signals.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    numbers = [signal.Signals[name] for name in signals.STOPS if name in signal.Signals.__members__]
    before = [(number, signal.getsignal(number)) for number in numbers]
    now = SimpleNamespace(at=time.monotonic())
    monkeypatch.setattr(signals.time, "monotonic", lambda: now.at)
    yield now
    for number, handler in before:
        signal.signal(number, handler)


def test_a_hangup_that_is_ignored_stays_so(clock):
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.asked and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        for _ in range(2):  # a repeated warning does not interrupt the saving
            os.kill(os.getpid(), signal.SIGUSR1)
            clock.at += 1
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert stop.code == 143


@pytest.mark.parametrize("name, again", [
    ("SIGUSR2", False), ("SIGXCPU", False), ("SIGALRM", False), ("SIGPWR", False), ("SIGQUIT", True)])
def test_every_warning_requests_a_stop(name, again, clock):
    """again: a second one leaves at once."""
    number = signal.Signals[name]
    signal.signal(number, signal.SIG_DFL)  # a shell lets its background jobs ignore SIGQUIT
    with Stop() as stop:
        signal.raise_signal(number)
        assert stop.asked
        clock.at += 1
        with pytest.raises(KeyboardInterrupt) if again else contextlib.nullcontext():
            signal.raise_signal(number)
    assert signal.getsignal(number) == signal.SIG_DFL and stop.code == (128 + number if again else 130)


# Seconds after the first signal, and whether the second one ends the run.
SECOND = [("", signal.SIGTERM, 0.1, False), ("", signal.SIGTERM, 0.9, True), ("", signal.SIGINT, 0.9, True),
          ("RANK", signal.SIGTERM, 8, False), ("RANK", signal.SIGTERM, 11, True), ("RANK", signal.SIGINT, 1, False),
          ("RANK", signal.SIGINT, 3, True), ("SLURM_JOB_ID", signal.SIGTERM, 8, False)]


@pytest.mark.parametrize("variable, number, after, ends", SECOND)
def test_two_signals_of_one_stop_are_one(variable, number, after, ends, clock, monkeypatch):
    if variable:
        monkeypatch.setenv(variable, "1")
    with Stop() as stop:
        signal.raise_signal(number)
        clock.at += after
        with pytest.raises(KeyboardInterrupt) if ends else contextlib.nullcontext():
            signal.raise_signal(number)
        assert stop.asked and stop.code == (128 + number if ends else 130)


@pytest.mark.parametrize("variable, ends", [("", [90]), ("SLURM_JOB_ID", [110])])
def test_a_time_limit_behind_its_warning_leaves_its_seconds_to_save(variable, ends, clock, monkeypatch):
    """SIGUSR1, and SIGTERM at the limit; SIGKILL follows after 30 s."""
    if variable:
        monkeypatch.setenv(variable, "1")
    began, ended = clock.at, []
    with Stop() as stop:
        signal.raise_signal(signal.SIGUSR1)
        for after in (90, 95, 110):  # the limit, the launcher's own, and one more
            clock.at = began + after
            try:
                signal.raise_signal(signal.SIGTERM)
            except KeyboardInterrupt:
                ended.append(after)
        assert stop.asked and ended[:1] == ends


def test_news_of_a_stop_are_no_signal(clock, monkeypatch):
    """Another process was signalled first, and this one in the next seconds."""
    monkeypatch.setenv("RANK", "1")
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    heard = []
    with Stop() as stop:
        signals.ask()
        clock.at += 60
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked
    clock.at += 5
    signal.raise_signal(signal.SIGTERM)  # a launcher's, after the checkpoint is written
    assert not heard
    clock.at += 10
    signal.raise_signal(signal.SIGTERM)
    assert heard == [1]  # the handler of before
    signal.raise_signal(signal.SIGTERM)
    assert heard == [1, 1]


def test_a_terminal_that_is_closed_leaves_a_checkpoint(model, tmp_path):
    """The system sends SIGHUP, and every further line of output fails."""
    command = arguments(model, tmp_path)
    (tmp_path / "plan").write_text("9")
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "flowgrpo", *command], stdin=slave, stdout=slave, stderr=slave,
                               start_new_session=True, preexec_fn=on_a_terminal)
    os.close(slave)
    until, drained = time.monotonic() + 120, 0
    os.set_blocking(master, False)
    while not (tmp_path / "hanging").exists():
        assert process.poll() is None and time.monotonic() < until
        with contextlib.suppress(BlockingIOError):
            drained += len(os.read(master, 65536))
        time.sleep(0.05)
    os.close(master)
    assert drained and process.wait(60) == 130
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").name == "epoch-00002"


def test_the_end_of_the_program_waits_for_no_thread():
    """As one of a reward's own pool."""
    code = ("import threading, time\nfrom flowgrpo.distributed.signals import leave\n"
            "threading.Thread(target=time.sleep, args=(600,)).start()\nprint('said')\nleave(143)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (143, "said\n", "")
