"""Signals that save the work done so far before the run ends. Calls that a signal may leave.

SIGHUP comes when a terminal or an ssh session is closed. Batch systems warn with SIGUSR1 (Slurm), SIGUSR2 (SGE, LSF),
SIGXCPU (seconds of CPU) and SIGALRM (a timer). SIGQUIT is Ctrl-\\, or the stop signal of a container; SIGPWR stops one
too, or tells that the power fails. SIGBREAK is that of Windows.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

from flowgrpo.errors import UserError

T = TypeVar("T")

STOPPING = "\nstopping after this step; once more to leave now"
# They may come several times for one cause: the shell and the system both hang up, SIGXCPU comes every second.
REPEATED = ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGALRM", "SIGPWR")
STOPS = ("SIGINT", "SIGTERM", "SIGQUIT", "SIGBREAK", *REPEATED)
# Seconds after the first signal within which another is the same stop. `timeout` and shells signal a process and its
# group, Slurm all processes of a job; torch's launcher then signals its own, and again as it ends.
SAME = 0.5
SAME_LAUNCHED = {signal.SIGINT: 2.0, signal.SIGTERM: 10.0}
LAUNCHED = ("RANK", "SLURM_JOB_ID")  # variables of a launcher, and of a scheduler
TICK = 0.1  # seconds between two looks at the signals while a reward is waited for
# Seconds that one call of the rewards may take on one of several processes, whose others wait for it.
PATIENCE = float(os.environ.get("FLOWGRPO_REWARD_SECONDS", 1800))

_active: "list[Stop]" = []  # that of the run that trains now
_latest: "list[Stop]" = []  # the last one that trained
limits: list[float] = []  # seconds that a call of the rewards may take: PATIENCE within a run of several processes


class Stopped(KeyboardInterrupt):
    """Stop requested, at a point where the run's state is consistent."""

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython shows in place of a traceback."""
        return ["flowgrpo: stopped; the same call with resume=\"auto\" goes on from what was saved"]


def under_launcher() -> bool:
    """True under a launcher or a scheduler, which may pass one stop on by several ways."""
    return any(name in os.environ for name in LAUNCHED)


class Stop:
    """Context manager: the first signal requests a stop at the next `check`; a second one interrupts immediately.

    A second signal within SAME seconds, or one of REPEATED, does nothing. Under a launcher neither does one that soon
    after the context of a stopped run, as it ends its processes once the first has ended, nor the first SIGTERM behind
    warnings, which a batch system sends some seconds before the end. In another thread than the main one (a notebook
    server's) nothing is caught.

    code: the exit code of an interrupt, 130, or 128 and the number of the second signal.
    teams: True where several processes run the same rows, which leave an evaluation together alone.
    """

    def __init__(self, teams: bool = False):
        self.asked, self.teams, self.code = False, teams, 130
        self._since: float | None = None  # time.monotonic of the first signal, or of the end
        self._warned = False  # all signals so far are of REPEATED
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        self._restore()
        main = threading.current_thread() is threading.main_thread()
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        known = [signal.Signals[name] for name in STOPS if name in signal.Signals.__members__] if main else []
        # `nohup` makes a process ignore SIGHUP; None is a handler of a C library.
        caught = [number for number in known if number.name in ("SIGINT", "SIGTERM")
                  or signal.getsignal(number) not in (signal.SIG_IGN, None)]
        self._before = {number: signal.signal(number, self._ask) for number in caught}
        _active.append(self)
        _latest[:] = [self]
        return self

    def __exit__(self, *_: object) -> None:
        _active.remove(self)
        if self.asked and under_launcher():
            self._since, self._warned = time.monotonic(), False
        else:
            self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _ask(self, number: int, frame: FrameType | None) -> None:
        repeated = signal.Signals(number).name in REPEATED
        first, now = self._since is None, time.monotonic()
        if self._warned and number == signal.SIGTERM and under_launcher():
            self._since = now
        self._warned = repeated and (first or self._warned)
        same = SAME_LAUNCHED.get(signal.Signals(number), SAME) if under_launcher() else SAME
        if self._since is not None and not repeated and now - self._since > same:
            if self not in _active:
                self._restore()
                signal.raise_signal(number)
                return
            self.code = 128 + number
            raise KeyboardInterrupt
        self.asked, self._since = True, self._since or now
        # Output goes nowhere where its terminal is gone: writing to it would fail, and with it the saving.
        for terminal in (each for each in self._terminals if repeated and not os.isatty(each)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, terminal)
            os.close(nowhere)
        if first and os.environ.get("RANK", "0") == "0":
            with suppress(RuntimeError, OSError, ValueError):  # the main program may be in the midst of a line
                print(STOPPING, file=sys.stderr, flush=True)

    def check(self) -> None:
        """Raise Stopped if a stop was requested."""
        if self.asked:
            raise Stopped


def exit_code() -> int:
    return _latest[0].code if _latest else 130


def ask() -> None:
    """Request a stop of the run that trains now, as its first signal does; without one do nothing."""
    for stop in _active:
        stop.asked = True


def stop_requested() -> bool:
    return any(stop.asked for stop in _active)


def check() -> None:
    """Raise Stopped if the run that trains now was asked to stop and its processes need not leave together."""
    if stop_requested() and not any(stop.teams for stop in _active):
        raise Stopped


def start_thread(call: Callable[[], T]) -> Future[T]:
    """Run `call` in a daemon thread, on the GPU and the stream of this one; return its future."""
    from flowgrpo.device import current_stream, use_stream  # loads torch

    future: Future[T] = Future()
    stream = current_stream()

    def work() -> T:
        use_stream(stream)
        return call()

    threading.Thread(target=complete, args=(future, work), daemon=True).start()
    return future


def complete(future: Future[T], call: Callable[[], T]) -> None:
    """Run `call`, and give the future its result or its error."""
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def result(future: Future[T], check: Callable[[], None] = check) -> T:
    """The future's result, for which this thread waits until `check` raises an error; UserError after PATIENCE in a run
    of several processes (`limits`)."""
    began = time.monotonic()
    while not wait([future], TICK).done:
        check()
        if limits and time.monotonic() - began > limits[0]:
            raise UserError(f"a reward hangs: no answer within {limits[0]:g} s, for which the other processes wait: "
                            "set the reward's timeout, or the environment variable FLOWGRPO_REWARD_SECONDS")
    return future.result()


def promptly(call: Callable[[], T]) -> T:
    """`call()`; in the main thread a signal ends the wait for it, whatever it does."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    return result(start_thread(call))


def leave(code: int) -> None:
    """End the process with an exit code. Threads and worker processes of rewards that hang do not hold it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if "multiprocessing" in sys.modules:
        from multiprocessing import active_children

        for child in active_children():
            child.terminate()
    os._exit(code)
