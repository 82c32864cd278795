"""Thread that writes files while the caller works on. Loads no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

NAME = "checkpoint"  # of the thread


class Background:
    """One write at a time, in a daemon thread; its error is raised where it is waited for."""

    def __init__(self) -> None:
        self._running: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """True while a write is running."""
        return self._running is not None and not self._running.done()

    def start(self, write: Callable[[], object]) -> None:
        """Call `write` in a thread, after the write before it. Raises the error of that one."""
        self.wait()
        self._running = future = Future[None]()
        threading.Thread(target=_complete, args=(future, write), daemon=True, name=NAME).start()

    def wait(self) -> None:
        """Return when no write is running. Raises the error of the last one, once; a signal's handler may end it."""
        if (running := self._running) is not None:
            error = running.exception()
            self._running = None
            if error is not None:
                raise error


def _complete(future: Future[None], write: Callable[[], object]) -> None:
    try:
        write()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)
