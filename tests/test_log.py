"""Bars and status lines, in a terminal and without one."""

import contextlib
import fcntl
import os
import select
import struct
import sys
import termios

from flowgrpo import log


@contextlib.contextmanager
def terminal(monkeypatch, columns=80):
    """Context manager: stderr is a terminal; yields what reads it until a text has come."""
    outer, inner = os.openpty()

    def expect(text):
        said = ""
        while text not in said:
            assert select.select([outer], [], [], 30)[0], said
            said += os.read(outer, 2**16).decode()

    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(inner, "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        yield expect
    os.close(outer)


def test_a_terminal_shows_a_bar_and_a_spinner_and_one_without_a_size_is_written_to_as_a_file(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    with terminal(monkeypatch) as expect:
        with log.bar(range(4), title="scoring", unit="image") as shown:
            expect("scoring:   0%|")
            assert [*shown] == [0, 1, 2, 3]
        with log.status("loading"):
            expect("loading")
    with terminal(monkeypatch, columns=0):
        assert sys.stderr.isatty() and not log.in_terminal()


def test_a_file_gets_a_status_and_work_that_is_long_in_lines_and_of_a_silent_process_nothing(capsys, monkeypatch):
    with log.status("loading") as update:
        update("loading more")
    assert [*log.bar(range(3), title="scoring", shown=False)] == [0, 1, 2]
    assert capsys.readouterr() == ("", "loading ...\n")
    assert [*log.bar(range(3), title="scoring", unit="image")] == [0, 1, 2]
    assert capsys.readouterr().err == ""  # it took less than FIRST
    monkeypatch.setattr(log, "FIRST", 1e-6)
    with log.bar(total=4, done=1, title="scoring", unit="image") as shown:
        shown.update(2)
        shown.update(1)  # within EVERY
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("scoring: 3/4 [00:00<00:0") and line.endswith("image/s]")
