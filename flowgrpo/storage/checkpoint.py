"""Checkpoints: written under a temporary name with a manifest of checksums, forced to the disk, then renamed.

So neither a kill nor a power cut leaves a partial one under a checkpoint's name. A checkpoint is a folder of
safetensors and JSON, never a pickle. Sampling, windows and data order are pure functions of (seed, epoch). So weights,
optimizer, moving average and a few counters are the whole state of a run. A run goes on from the newest whole one;
damaged ones are set aside, never deleted.

Sharded tensors are in one file per shard: the rows (dimension 0) of a tensor in the order of the files' names. They are
read row by row, so a run can be resumed with another number of shards, or whole.
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flowgrpo.errors import UserError
from flowgrpo.storage import atomic, manifest, paths
from flowgrpo.storage.places import STATE, checkpoint_name, checkpoints, epoch_of, foreign

VALUES = "state.json"
UNSTEADY = "unsteady"  # value of a checkpoint: its last update was skipped, for a gradient that is not finite
GROWN = "grown"  # value of a checkpoint: training has moved its weights by more than the base's own size
Tensors = dict[str, torch.Tensor]


class Stateful(Protocol):
    """Part of a run with a state of its own in every checkpoint."""

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """The tensors and the values (JSON) to keep."""

    def load_state(self, tensors: Tensors, values: dict[str, Any]) -> None:
        """Restore what `state` returned; without any, start anew."""


def begin(folder: Path, epoch: int) -> Path:
    """Make the temporary folder of a checkpoint and return it, empty; delete what a kill left of others."""
    for left in folder.glob(".epoch-*"):
        if left.suffix in (".tmp", ".old"):
            shutil.rmtree(left, ignore_errors=True)
    temporary = _temporary(folder, epoch)
    atomic.make_folder(temporary)
    return temporary


def save_shard(folder: Path, epoch: int, tensors: Tensors, index: int, count: int) -> None:
    """Write one of `count` shards of tensors into the folder that `begin` made: their rows in it.
    Raises UserError if that folder is not there."""
    temporary = _temporary(folder, epoch)
    if not temporary.is_dir():
        raise UserError(f"{folder} is not the folder that the first process writes to: with memory.shard, put `output` "
                        "on a disk that all nodes share")
    _write(temporary / f"shard-{index:05d}-of-{count:05d}.safetensors", tensors)


def save(folder: Path, epoch: int, tensors: Tensors, state: dict[str, Any], keep: int, begun: bool = False) -> Path:
    """Write `folder/epoch-00042` and delete checkpoints that are neither the newest nor of the `keep` to be kept.
    These are the newest ones whose last update was made, with weights that have not grown; if there are fewer, others
    too.
    begun: `begin` was called, and the shards are written."""
    target, temporary = folder / checkpoint_name(epoch), _temporary(folder, epoch)
    if not begun:
        begin(folder, epoch)
    _write(temporary / STATE, tensors)
    atomic.write_text(temporary / VALUES, json.dumps(state, indent=1))
    manifest.write(temporary)
    if target.is_dir():
        atomic.rename(target, _backup_path(target))
    atomic.rename(temporary, target)
    shutil.rmtree(_backup_path(target), ignore_errors=True)
    known = list(checkpoints(folder).values())
    kept = [*sorted(reversed(known), key=lambda path: is_marked(path, UNSTEADY))[:keep], known[-1]]
    for path in known:
        if path not in kept:
            atomic.remove(path)
    return target


def is_marked(folder: Path, mark: str) -> bool:
    """True for a checkpoint with the mark UNSTEADY or GROWN, and for one that cannot be read."""
    try:
        return bool(_values(folder).get(mark))
    except (OSError, ValueError, RecursionError):
        return True


def _backup_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _temporary(folder: Path, epoch: int) -> Path:
    return folder / f".{checkpoint_name(epoch)}.tmp"


def _write(file: Path, tensors: Tensors) -> None:
    save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, file)
    paths.readable(file)
    atomic.sync(file)


def latest(folder: Path) -> Path | None:
    """The checkpoint with the highest epoch, unchecked; None without one."""
    return next(reversed(checkpoints(folder).values()), None)


def damage(folder: Path, required: Mapping[str, type | tuple[type, ...]] = {}) -> str | None:
    """The damage of a checkpoint in words; None if it is whole.
    All its files are read once: compared with the manifest, where there is one, and for their form. required: types of
    values by key, None among them for one that earlier versions lack; numbers are 0 or more."""
    if manifest.has_manifest(folder) and (difference := manifest.difference(folder)):
        return difference
    try:
        values, reader = _values(folder), Reader(folder)
        shapes, wrong = reader.shapes, reader.misfit()
    except Exception as error:  # of any library that reads the files
        return " ".join(str(error).split()) or type(error).__name__
    for key, kind in required.items():
        value = values.get(key)
        below = isinstance(value, (int, float)) and not value >= 0
        if not isinstance(value, kind) or below or kind is int and isinstance(value, bool):
            return f"{VALUES} has {str(value)[:40]} under {key!r}"
    if "epoch" in required and values["epoch"] != epoch_of(folder):
        return f"{VALUES} has {values['epoch']} under 'epoch'"
    if values.get("update") and not manifest.has_manifest(folder) and \
            not any(key.startswith("optimizer/") for key in shapes):
        return "the optimizer's state is missing"  # with a manifest it is that of a return to the first weights
    return wrong


def _values(folder: Path) -> dict[str, Any]:
    values = json.loads((folder / VALUES).read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{VALUES} holds a {type(values).__name__}, expected an object")
    return values


def manifest_note(folder: Path) -> str | None:
    """A sentence about a checkpoint without a manifest; None with one."""
    return None if manifest.has_manifest(folder) else \
        f"{folder} has no {manifest.MANIFEST}, as it is of an older run: its checksums cannot be verified"


class Reader:
    """Tensors of a checkpoint, read one by one.

    shapes: of the whole tensors, by key.
    """

    def __init__(self, folder: Path):
        shards = sorted(folder.glob("shard-*.safetensors"))
        if shards and not shards[0].stem.endswith(f"-of-{len(shards):05d}"):
            raise FileNotFoundError(f"{shards[0].name} is one of {len(shards)} shards")
        files = [safe_open(file, "pt") for file in (folder / STATE, *shards)]
        self.parts: dict[str, list[Any]] = {}
        for file in files:
            for key in file.keys():  # noqa: SIM118 it is no dictionary
                self.parts.setdefault(key, []).append(file)
        self.shapes: dict[str, torch.Size] = {}
        for key, of in self.parts.items():
            shapes = [file.get_slice(key).get_shape() for file in of]
            whole = shapes[0] if len(shapes) == 1 else [sum(shape[0] for shape in shapes), *shapes[0][1:]]
            self.shapes[key] = torch.Size(whole)

    def misfit(self) -> str | None:
        """In words which weights are no floats, or what the optimizer's state lacks; None if all is there."""
        states: dict[str, set[str]] = {}
        for key, files in self.parts.items():
            room, _, name = key.partition("/")
            if room in ("weights", "ema") and "F" not in (kind := files[0].get_slice(key).get_dtype()):
                return f"{key} is of {kind}"
            if room == "optimizer":
                states.setdefault(name.partition(".")[0], set()).add(name.partition(".")[2])
        known = set().union(*states.values())
        return next((f"the optimizer's state lacks {place}.{min(known - held)}" for place, held in states.items()
                     if known - held), None)

    def read(self, key: str, rows: slice | None = None) -> torch.Tensor:
        """A tensor, or its `rows` with a start and a stop."""
        if len(self.parts[key]) == 1 and rows is None:
            return self.parts[key][0].get_tensor(key)  # it may have no rows
        rows = rows or slice(0, self.shapes[key][0])
        pieces, first = [], 0
        for part in (file.get_slice(key) for file in self.parts[key]):
            pieces.append(part[max(rows.start - first, 0):max(rows.stop - first, 0)])
            first += part.get_shape()[0]
        return torch.cat(pieces)


def load(folder: Path, rows: Callable[[str], slice | None] = lambda key: None, verify: bool = True
         ) -> tuple[Tensors, dict[str, Any]]:
    """The (tensors, state) that `save` wrote; whole tensors, or those rows of a key that `rows` names.
    verify: compare with the manifest first; a line on stderr says if there is none.
    Raises UserError if they cannot be read."""
    try:
        if verify and (line := manifest_note(folder)):
            print(line, file=sys.stderr)
        if verify and (difference := manifest.difference(folder)):
            raise ValueError(difference)
        reader = Reader(folder)
        return {key: reader.read(key, rows(key)) for key in reader.shapes}, _values(folder)
    except Exception as error:
        raise unreadable(folder, error) from None


def shapes(folder: Path) -> dict[str, torch.Size]:
    """The shapes of a checkpoint's whole tensors. Raises UserError if they cannot be read."""
    try:
        return Reader(folder).shapes
    except Exception as error:
        raise unreadable(folder, error) from None


def unreadable(folder: Path, error: Exception) -> UserError:
    """The one-line error for a checkpoint that cannot be read, with the fix."""
    known = checkpoints(folder.parent)
    epoch = next((epoch for epoch, path in known.items() if path.name == folder.name), 0)
    earlier = [other.name for number, other in known.items() if number < epoch]
    way = f"remove it to go on from {earlier[-1]}" if earlier else \
        "no earlier one is there, begin anew without --resume"
    message = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"the checkpoint {folder} cannot be read ({message}): {way}")


def joined(rooms: Mapping[Any, Mapping[str, torch.Tensor]]) -> Tensors:
    """Tensors of several rooms as one dictionary, `room/name`."""
    return {f"{room}/{name}": tensor for room, tensors in rooms.items() for name, tensor in tensors.items()}


def within(tensors: Tensors, prefix: str) -> Tensors:
    """Those tensors whose names begin so, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """An optimizer's state as flat tensors `0.exp_avg`, `0.step`, ...; integers become int64 tensors."""
    flat: dict[str, torch.Tensor] = {}
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            # The extra level is bitsandbytes'; its tables are cloned, as a file cannot share them.
            inner = {name: table.clone() for name, table in value.items()} if isinstance(value, dict) else {key: value}
            flat |= {f"{index}.{name}": torch.as_tensor(each) for name, each in inner.items()}
    return flat


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Load the state that `optimizer_tensors` flattened into an optimizer; its groups stay unchanged.
    Raises ValueError for a state that lacks a tensor, or has one of another shape than its parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor | int]] = {}
    for name, tensor in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = int(tensor) if tensor.dtype == torch.int64 else tensor
    moments = {"exp_avg", "exp_avg_sq"} if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) else set()
    known = moments.union(*state.values())
    for place, values in state.items():
        if place >= len(parameters):
            raise ValueError(f"the optimizer's state is of {place + 1} parameters, expected {len(parameters)}")
        if lacking := sorted(known - values.keys()):
            raise ValueError(f"the optimizer's state lacks {place}.{lacking[0]}")
        for key in moments:
            found, shape = torch.as_tensor(values[key]), parameters[place].shape
            if found.shape != shape or not found.is_floating_point():
                raise ValueError(f"the optimizer's state has {place}.{key} of {list(found.shape)} in {found.dtype}, "
                                 f"expected {list(shape)}")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def newest_whole(folder: Path, log: Callable[[str], None], required: Mapping[str, type | tuple[type, ...]]
                 ) -> Path | None:
    """The checkpoint of the highest epoch that is whole; None without one.
    A damaged one is renamed to NAME.damaged and reported in a line, as are folders of other names and a checkpoint
    without checksums. folder: of all checkpoints. required: types of the values that a checkpoint has to hold."""
    for replaced in folder.glob(".epoch-*.replaced"):  # names that a kill kept from being given back
        target = folder / replaced.name.removeprefix(".").removesuffix(".replaced")
        if target.is_dir():
            shutil.rmtree(replaced)
        else:
            atomic.rename(replaced, target)
    for line in foreign(folder):
        log(line)
    for path in reversed(list(checkpoints(folder).values())):
        wrong = damage(path, required)
        if wrong is None:
            if note := manifest_note(path):
                log(note)
            return path
        aside = set_aside(path)
        earlier = latest(folder)
        then = f"{earlier.name} is tried" if earlier else "there is no earlier one"
        log(f"the checkpoint {path} is damaged ({wrong}): it is now {aside.name}, and {then}")
    return None


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder to NAME.damaged, or to NAME.damaged.2 and so on; return the new path."""
    names = (path.with_name(f"{path.name}.damaged{'' if number == 1 else f'.{number}'}") for number in count(1))
    return atomic.rename(path, next(name for name in names if not name.exists()))
