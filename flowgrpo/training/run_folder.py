"""Folder of a run: lock it, resume from it, or archive an earlier run; the files that are written before the first
epoch; and the inputs by hash, to report on resuming what changed besides the configuration. Results are never deleted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import reduce
from itertools import count
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from flowgrpo import trust
from flowgrpo.config.parse import load
from flowgrpo.config.schema import Config, keys
from flowgrpo.data.prompts import Prompt
from flowgrpo.data.provenance import PROMPTS
from flowgrpo.device import AUTO
from flowgrpo.errors import UserError
from flowgrpo.evaluation.report import snapshots
from flowgrpo.methods.setup import Setup
from flowgrpo.nouns import SAMPLE
from flowgrpo.packages import version
from flowgrpo.policies.policy import Policy
from flowgrpo.rewards.find import GROUP
from flowgrpo.starter import FOLDERS
from flowgrpo.storage import atomic, checkpoint
from flowgrpo.storage.json_files import decode, json_digest, read_lines, read_object
from flowgrpo.storage.manifest import sha256
from flowgrpo.storage.places import CRASH, checkpoints, epoch_of, lock_run
from flowgrpo.training import state
from flowgrpo.user_code import group_entry_points

if TYPE_CHECKING:
    from accelerate import Accelerator

# Keys that change the meaning of a checkpoint's weights and state.
FIXED = ("model", "method", "preferences", "adapter.rank", "adapter.alpha", "adapter.dora", "adapter.rslora",
         "adapter.targets", "adapter.encoder_targets")
READ_TWICE = 2**30  # bytes of a checkpoint
APART = ("name", "output")  # the location of the run
FILE = "inputs.json"  # in the run's folder
PACKAGES = ("flowgrpo", "torch", "diffusers", "transformers", "peft", "accelerate", "safetensors")

Split = tuple[list[Prompt], list[Prompt]]
T = TypeVar("T")


def of_first(accelerator: Accelerator, find: Callable[[], T]) -> T:
    """The first process's result, on all processes."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([find() if accelerator.is_main_process else None])[0]


def resumes(config: Config, accelerator: Accelerator, asked: bool | Literal["auto"]) -> bool:
    """True if the run resumes: as asked, or with "auto" if the first process finds a run in its folder. One of which
    all checkpoints are damaged begins anew, since a restarted job has to go on; its folder is kept under another name.
    """
    if asked != AUTO:
        return bool(asked)
    # A checkpoint above READ_TWICE counts unread: `last_whole` reads it.
    there = of_first(accelerator, lambda: any(
        sum(file.stat().st_size for file in path.iterdir()) > READ_TWICE or
        checkpoint.damage(path, state.REQUIRED) is None
        for path in reversed(checkpoints(config.folder / "checkpoints").values())))
    if accelerator.is_main_process and not there:
        what = "whole checkpoint" if holds_run(config.folder) else "checkpoint"
        print(f"--resume=auto: no {what} in {config.folder / 'checkpoints'}, so the run begins", flush=True)
    return there


def last_whole(config: Config, accelerator: Accelerator) -> Path:
    """The newest whole checkpoint of the run, as the first process finds it, which sets damaged ones aside. Raises
    UserError without one."""
    folder = config.folder / "checkpoints"
    last = of_first(accelerator, lambda: checkpoint.newest_whole(folder, print, state.REQUIRED))
    if last is None:
        damaged = len([*folder.glob("*.damaged*")])
        found = f"no whole checkpoint in {folder} ({damaged} damaged)" if damaged else f"no checkpoint in {folder}"
        raise UserError(f"--resume: {found}: expected one that an earlier run left; --resume=auto, or the command "
                        "without --resume, begins anew and keeps an earlier run's folder under another name")
    return last


def threads_by_epoch(config: Config, last: Path, accelerator: Accelerator) -> dict[int, int]:
    """Torch's threads on a CPU in each epoch after the checkpoint `last`, as metrics.jsonl has them."""
    def find() -> dict[int, int]:
        file = config.folder / "metrics.jsonl"
        rows = map(_row, file.read_bytes().split(b"\n")[:-1] if file.is_file() else ())
        return {row["epoch"]: row["threads"] for row in rows
                if isinstance(row.get("threads"), int) and row["epoch"] > epoch_of(last)}

    return of_first(accelerator, find)


def require_same(config: Config, last: Path) -> list[str]:
    """The changes since the run that left the checkpoint `last`, such as "train.lr: 0.001, was 0.0005".
    Raises UserError if a change does not fit its weights, or takes back epochs."""
    epoch, changes = epoch_of(last), []
    if epoch > config.train.epochs:
        raise UserError(f"--resume: train.epochs is {config.train.epochs}, but {epoch} are done: expected as many, or "
                        "more")
    file, now = config.folder / "config.yaml", config.model_dump(mode="json")
    before = load(file).model_dump(mode="json") if file.is_file() else now
    for key in keys():
        value, was = (reduce(getitem, key.split("."), dumped) for dumped in (now, before))
        if key in APART or was == value:
            continue
        if key in FIXED:
            raise UserError(f"--resume: {key} is {value!r}, but the run in {config.folder} began with {was!r}: "
                            "keep it, or give the run another name")
        changes.append(f"{key}: {value}, was {was}")
    return changes


def check(setup: Setup) -> None:
    """Raise UserError in the first process if another run is writing to the run's folder, or if the folder is to be
    archived and holds files that this run reads. Its own list of prompts is exempt: it is written again."""
    config, folder = setup.config, setup.config.folder
    if not setup.first:
        return
    require_free(folder)
    if setup.resumes or not holds_run(folder):
        return
    named: dict[str, list[Any]] = {
        "model": [config.model], "prompts": [config.prompts], "held_out": [str(config.held_out)],
        "preferences": [config.preferences], "cache": [config.cache], "reward": list(config.trained)}
    for key, value in ((key, value) for key, values in named.items() for value in values if value):
        apart = value in FOLDERS or Path(value) == folder / PROMPTS
        if not apart and Path(value).resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{key} is {value}, in the folder of an earlier run, which a new run of the same name "
                            "would rename: give this one another name (--name)")


def require_free(folder: Path) -> None:
    """Raise UserError if another run is writing to the folder."""
    if folder.is_dir():
        with lock_run(folder):
            pass


def holds_run(folder: Path) -> bool:
    """True if a run has left a result or whole epochs in the folder."""
    damaged = any((folder / "checkpoints").glob("*.damaged*"))
    return (folder / "summary.json").is_file() or damaged or any(checkpoints(folder / "checkpoints"))


def set_aside(folder: Path) -> Path | None:
    """Rename the folder of a run that has left something; return the new name, None if there was nothing.
    Raises UserError if it cannot be renamed."""
    if not holds_run(folder):
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # checkpoints before any epoch
        return None
    free = next(name for number in count(1) if not (name := folder.with_name(f"{folder.name}.{number}")).exists())
    try:
        return atomic.rename(folder, free)
    except OSError as error:
        raise UserError(f"{folder} holds an earlier run and cannot be renamed to {free} ({error.strerror}): give this "
                        "one another name, or --resume that one") from None


def keep_lines(path: Path, epoch: int) -> None:
    """Drop the metrics of epochs that will be run (again), and a last line that a kill cut off.
    A damaged last line is moved to NAME.damaged and reported. Raises UserError for another damaged line."""
    if not path.exists():
        return
    content = path.read_bytes()
    lines = content.split(b"\n")[:-1]
    if lines and "epoch" not in _row(lines[-1]):
        aside = path.with_name(f"{path.name}.damaged")
        atomic.append_line(aside, lines.pop().decode("utf-8", "backslashreplace"))
        print(f"{path}: the last line is damaged: it is now in {aside.name}")
        atomic.write_bytes(path, b"".join(line + b"\n" for line in lines))
    read_lines(path, "epoch")  # raises
    kept = b"".join(line + b"\n" for line in lines if _row(line).get("epoch", 0) <= epoch)
    if kept != content:
        atomic.write_bytes(path, kept)


def _row(line: bytes) -> dict[str, Any]:
    """The metrics of a line that has an epoch; {} if it is damaged."""
    try:
        row = decode(line.decode())
        return row if isinstance(row["epoch"], (int, float)) else {}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def hash_inputs(config: Config, split: Split) -> dict[str, Any]:
    """Hashes of the user's code files by path, versions of packages, and hashes of the prompts.
    split: training and held-out prompts."""
    named = {file for text in trust.texts(config) for file in trust.code_files(text)}
    files = sorted(file for file in named if file.is_file())
    rules = config.trained | config.extra_rewards
    points = group_entry_points(GROUP)
    used = {rule.use or label for label, rule in rules.items()}
    dists = {point.dist.name for name, point in points.items() if name in used and point.dist}
    return {"code": {str(path): sha256(path) for path in files},
            "packages": {name: version(name) for name in (*PACKAGES, *sorted(dists))},
            "prompts": {side: {"texts": json_digest([[prompt.text, prompt.negative] for prompt in prompts]),
                               "metadata": json_digest([[prompt.metadata, prompt.weight] for prompt in prompts])}
                        for side, prompts in zip(("training", "held-out"), split)}}


def changes(folder: Path, now: dict[str, Any]) -> list[str]:
    """In words what differs from the inputs that the run in the folder began or went on with.
    Empty for a run of an earlier version, which has not recorded them."""
    if not (folder / FILE).is_file():
        return []
    try:
        was = read_object(folder / FILE, "it is written anew", code=dict, packages=dict, prompts=dict)
    except UserError as error:
        return [f"unknown inputs: {error}"]
    said = [f"other code in {path}" for path, digest in now["code"].items() if was["code"].get(path, digest) != digest]
    said += [f"{name} {number}, was {was['packages'][name]}" for name, number in now["packages"].items()
             if was["packages"].get(name, number) != number]
    for side, hashes in now["prompts"].items():
        before = was["prompts"].get(side)
        before = before if isinstance(before, dict) else {}
        said += [f"other {kind} of the {side} prompts" for kind, digest in hashes.items()
                 if before.get(kind, digest) != digest]
    return said


@contextmanager
def lock_folder(setup: Setup, epoch: int, resumed: bool, changes: list[str], policy: Policy, precision: str,
                listed: str | None) -> Iterator[None]:
    """Context manager: archive an earlier run of the folder, or resume this one after `epoch`, and keep it locked
    against other runs. The run's configuration, its prompts, the hashes of all inputs and its machine are written
    there, and the error that ends it as one line; a stop is none. precision: in words. listed: content of the run's
    own prompt file; None: it has none."""
    config, folder = setup.config, setup.config.folder
    require_free(folder)
    if not resumed and (moved := set_aside(folder)):
        print(f"{folder} held an earlier run, which is now {moved}")
    for change in changes:
        print(f"resumed with {change}")
    with lock_run(folder):
        (folder / CRASH).unlink(missing_ok=True)
        try:
            atomic.write_text(folder / "config.yaml", config.yaml())
            keep_lines(folder / "metrics.jsonl", epoch)
            if listed is not None:
                atomic.write_text(folder / PROMPTS, listed)
            atomic.write_text(folder / FILE, json.dumps(hash_inputs(config, setup.split), indent=1) + "\n")
            snapshots.begin(folder, epoch, setup.device, setup.processes, precision, SAMPLE[policy.modality],
                            policy.unit)
            yield
        except Exception as error:
            said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            with suppress(OSError):  # it may be the disk that is full
                atomic.write_text(folder / CRASH, " ".join(said.split()) + "\n")
            raise
