"""Ctrl-C and SIGTERM: save the work done so far before the run ends."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Stopped(KeyboardInterrupt):
    """Stop requested, at a point where the run's state is consistent."""


class Stop:
    """Context manager: the first signal requests a stop at the next `check`; a second one interrupts at once.

    Python sends signals to the main thread alone: in another one (a notebook server's) nothing is caught.
    """

    def __init__(self):
        self.asked = False

    def __enter__(self) -> Stop:
        caught = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        self._before = {number: signal.signal(number, self._ask) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        """Raise Stopped if a stop was requested."""
        if self.asked:
            raise Stopped
