"""Places of a run by path: its folder, its checkpoints, its LoRA file; and its lock, held by the run that writes to it.

Loads no torch.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from flowgrpo.errors import UserError
from flowgrpo.storage import atomic

STATE = "state.safetensors"  # the file that makes a folder a checkpoint
CONFIG = "config.yaml"  # the file that makes a folder a run
CRASH = "crash.txt"  # the error that ended a run
NAMED = re.compile(r"epoch-(\d{5,})")  # folder of a checkpoint


def checkpoint_name(epoch: int) -> str:
    return f"epoch-{epoch:05d}"


def epoch_of(folder: Path) -> int:
    return int(folder.name.removeprefix("epoch-"))


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in a run's folder of checkpoints by epoch, in the order of the numbers."""
    matches = [(NAMED.fullmatch(path.name), path) for path in folder.glob("epoch-*")]
    return {epoch: path for epoch, path in sorted((int(match[1]), path) for match, path in matches if match)}


def foreign(folder: Path) -> list[str]:
    """A line for each name in a folder of checkpoints that looks like one and is none, such as epoch-copy.
    Damaged checkpoints that a run has set aside are left out."""
    return [f"ignored {path}: it is no checkpoint, expected a name such as epoch-00042"
            for path in sorted(folder.glob("epoch-*"))
            if not NAMED.fullmatch(path.name) and ".damaged" not in path.name]


def list_checkpoints(run: Path) -> dict[int, Path]:
    """List a run's checkpoints by epoch, and other folders beside them in a line on stderr."""
    for line in foreign(run / "checkpoints"):
        print(line, file=sys.stderr)
    return checkpoints(run / "checkpoints")


def is_checkpoint(path: Path | None) -> bool:
    return path is not None and (path / STATE).is_file()


def run_of(path: Path) -> Path:
    """The folder of a run, given that, a checkpoint or a LoRA file in it. Raises UserError for another path."""
    if not path.exists():
        raise UserError(f"no run at {path}: expected the folder that `flowgrpo train` wrote, or one of its checkpoints")
    run = path.parent.parent if is_checkpoint(path) else path.parent if path.is_file() else path
    if (run / CONFIG).is_file():
        return run
    if path.is_file():
        raise UserError(f"{path} is in no run's folder: expected a run or its checkpoint; a LoRA's file goes with "
                        f"its model, as in `flowgrpo sample MODEL --prompt TEXT --lora {path}`")
    raise UserError(f"{path} is not a run: it has no {CONFIG}; expected a folder that `flowgrpo train` wrote")


def weights_of(path: Path, epoch: int | None = None) -> Path:
    """The place of a run's weights: its folder for the result, or the checkpoint of an epoch.
    path: as of `run_of`. Raises UserError if the path is of no run, or the epoch has no checkpoint."""
    run = run_of(path)
    if epoch is None:
        return path if is_checkpoint(path) else run
    if is_checkpoint(path):
        raise UserError(f"--epoch {epoch}: {path} is a checkpoint already; leave one of them out")
    saved = list_checkpoints(run)
    if epoch not in saved:
        raise UserError(f"--epoch {epoch}: {run} has no such checkpoint; there are: "
                        f"{', '.join(map(str, saved)) or 'none'} (train.keep says how many are kept)")
    return saved[epoch]


LOCK = ".lock"  # in the folder of an active run


@contextlib.contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Context manager: lock the folder against other runs; without effect on a file system without locks.
    Raises UserError if another run has it."""
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
    if not (folder / LOCK).is_file():
        return False
    try:
        with lock_run(folder):
            return False
    except UserError:
        return True


def unfinished(folder: Path) -> str:
    """The end of a message on a run without weights: that it trains now, or that it stopped."""
    return "the run is training: wait for its end, or name one of its checkpoints" if is_held(folder) else \
        "the run has not finished: --resume it"
