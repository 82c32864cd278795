"""What a run's folder holds of an earlier run: it is gone on from as it was, or set aside, and never lost."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flowgrpo.config.parse import load
from flowgrpo.config.schema import Config, sections
from flowgrpo.data.provenance import PROMPTS
from flowgrpo.errors import UserError
from flowgrpo.starter import FOLDERS
from flowgrpo.storage import checkpoint
from flowgrpo.storage.json_files import read_lines

# What makes a checkpoint's weights, and the state that goes with them, mean something else.
FIXED = ("model", "method", "preferences", "adapter.rank", "adapter.alpha", "adapter.dora", "adapter.rslora",
         "adapter.targets", "adapter.encoder_targets")
APART = ("name", "output")  # where the run lies
LOCK = ".lock"  # in the folder of a run, while it is written to


def require_same(config: Config, last: Path) -> list[str]:
    """What was changed since the run that left the checkpoint `last`, such as "train.lr: 0.001, was 0.0005".

    UserError where that does not go with its weights, or takes back epochs.
    """
    epoch, told = int(last.name.removeprefix("epoch-")), []
    if epoch > config.train.epochs:
        raise UserError(f"--resume: train.epochs is {config.train.epochs}, but {epoch} are done: expected as many, or "
                        "more")
    file = config.folder / "config.yaml"
    was = _flat(load(file).model_dump(mode="json")) if file.is_file() else {}
    for key, value in _flat(config.model_dump(mode="json")).items():
        if key in APART or key not in was or was[key] == value:
            continue
        if key in FIXED:
            raise UserError(f"--resume: {key} is {value!r}, but the run in {config.folder} began with {was[key]!r}: "
                            "keep it, or give the run another name")
        told.append(f"{key}: {value}, was {was[key]}")
    return told


def precision(config: Config) -> str | None:
    """The precision of the run in the configuration's folder; None where no run has written one down."""
    file = config.folder / "config.yaml"
    return load(file).precision if file.is_file() else None


def _flat(nested: dict[str, Any], above: str = "") -> dict[str, Any]:
    """The values of sections under dotted keys; what a person names (parts, rewards) stays whole."""
    found = {}
    for key, value in nested.items():
        if isinstance(value, dict) and f"{above}{key}" in sections():
            found |= _flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Inside, no other run takes the folder. UserError where another has it; on a file system without locks nobody
    does."""
    folder.mkdir(parents=True, exist_ok=True)
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


def require_free(folder: Path) -> None:
    """UserError where another run is writing to the folder."""
    if folder.is_dir():
        with held(folder):
            pass


def require_outside(config: Config) -> None:
    """UserError where the run's folder is to be set aside and holds what this run reads; its own list of prompts is
    written anew."""
    folder = config.folder
    if not holds_run(folder):
        return
    named = {"model": [config.model], "prompts": [config.prompts], "held_out": [str(config.held_out)],
             "preferences": [config.preferences], "cache": [config.cache], "reward": list(config.trained)}
    for key, value in ((key, value) for key, values in named.items() for value in values if value):
        apart = value in FOLDERS or Path(value) == folder / PROMPTS
        if not apart and Path(value).resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{key} is {value}, in the folder of an earlier run, which a new run of the same name "
                            "would rename: give this one another name (--name)")


def holds_run(folder: Path) -> bool:
    """Whether a run has left something in the folder: a result, or whole epochs."""
    last = checkpoint.latest(folder / "checkpoints")
    return (folder / "summary.json").is_file() or (last is not None and last.name > "epoch-00000")


def set_aside(folder: Path) -> Path | None:
    """Rename the folder of a run that has left something; returns the new name, None where there was nothing.

    UserError where it cannot be renamed.
    """
    if not holds_run(folder):
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a first one, before any epoch
        return None
    free = next(name for number in count(1) if not (name := folder.with_name(f"{folder.name}.{number}")).exists())
    try:
        return folder.rename(free)
    except OSError as error:
        raise UserError(f"{folder} holds an earlier run and cannot be renamed to {free} ({error.strerror}): give this "
                        "one another name, or --resume that one") from None


def keep_lines(path: Path, epoch: int) -> None:
    """Drop the metrics of epochs that will be run (again), and a last line that a kill cut off."""
    if path.exists():
        told, kept = read_lines(path, "epoch"), path.with_suffix(".tmp")
        whole = path.read_text().splitlines(keepends=True)
        kept.write_text("".join(line for line, found in zip(whole, told) if found["epoch"] <= epoch))
        kept.replace(path)
