"""Lock of a run's folder, held by the run that writes to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from flowgrpo.errors import UserError
from flowgrpo.storage import atomic

LOCK = ".lock"  # in the folder of an active run


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Context manager: lock the folder against other runs; without effect on a file system without locks.

    Raises UserError if another run has it.
    """
    atomic.make_folder(folder)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(f"another run is writing to {folder}: give this one another name (--name), or wait for that "
                        "one") from None
    except (NotImplementedError, OSError):
        pass
    try:
        yield
    finally:
        lock.release()


def is_held(folder: Path) -> bool:
    """Return True if a run is writing to the folder."""
    if not (folder / LOCK).is_file():
        return False
    try:
        with held(folder):
            return False
    except UserError:
        return True
