"""Ctrl-C and SIGTERM: the work done so far is saved before the run ends."""

from __future__ import annotations

import signal


class Stopped(KeyboardInterrupt):
    """The run was asked to stop and has reached a point where its state is whole."""


class Stop:
    """Inside `with`, the first signal asks for a stop at the next `check`; a second one interrupts at once."""

    def __init__(self):
        self.asked = False

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number, frame) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        """Raise Stopped if a stop was asked for."""
        if self.asked:
            raise Stopped
