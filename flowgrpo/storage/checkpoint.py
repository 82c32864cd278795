"""Checkpoints: written under a temporary name, then renamed, so a kill never leaves a partial one.

A checkpoint is a folder of safetensors and JSON, never a pickle. Sampling, windows and data order are pure functions of
(seed, epoch). So weights, optimiser, moving average and a few counters are the whole state of a run.

Sharded tensors are in one file per shard: the rows (dimension 0) of a tensor in the order of the files' names. They are
read row by row, so a run can be resumed with another number of shards, or whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flowgrpo.errors import UserError
from flowgrpo.storage import paths
from flowgrpo.storage.places import STATE

Tensors = dict[str, torch.Tensor]


class Stateful(Protocol):
    """Part of a run with a state of its own in every checkpoint."""

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the tensors and the values (JSON) to keep."""

    def load_state(self, tensors: Tensors, values: dict[str, Any]) -> None:
        """Restore what `state` returned; without any, start anew."""


def begin(folder: Path, epoch: int) -> Path:
    """Make the temporary folder of a checkpoint and return it, empty."""
    temporary = _temporary(folder, epoch)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def save_shard(folder: Path, epoch: int, tensors: Tensors, index: int, count: int) -> None:
    """Write one of `count` shards of tensors into the folder that `begin` made: their rows in it.

    Raises UserError if that folder is not there.
    """
    temporary = _temporary(folder, epoch)
    if not temporary.is_dir():
        raise UserError(f"{folder} is not the folder that the first process writes to: with memory.shard, put `output` "
                        "on a disk that all nodes share")
    _write(temporary / f"shard-{index:05d}-of-{count:05d}.safetensors", tensors)


def save(folder: Path, epoch: int, tensors: Tensors, state: dict[str, Any], keep: int, begun: bool = False) -> Path:
    """Write `folder/epoch-00042` and delete all but the newest `keep` checkpoints.

    begun: `begin` was called, and the shards are written.
    """
    target, temporary = folder / f"epoch-{epoch:05d}", _temporary(folder, epoch)
    if not begun:
        begin(folder, epoch)
    _write(temporary / STATE, tensors)
    (temporary / "state.json").write_text(json.dumps(state, indent=1))
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    for old in sorted(folder.glob("epoch-*"))[:-keep]:
        shutil.rmtree(old)
    return target


def _temporary(folder: Path, epoch: int) -> Path:
    return folder / f".epoch-{epoch:05d}.tmp"


def _write(file: Path, tensors: Tensors) -> None:
    save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, file)
    paths.readable(file)


def latest(folder: Path) -> Path | None:
    """Return the checkpoint with the highest epoch; None without one."""
    return max(folder.glob("epoch-*"), default=None)


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
        self.shapes = {key: self._shape(key) for key in self.parts}

    def _shape(self, key: str) -> torch.Size:
        shapes = [file.get_slice(key).get_shape() for file in self.parts[key]]
        return torch.Size(shapes[0] if len(shapes) == 1 else [sum(shape[0] for shape in shapes), *shapes[0][1:]])

    def read(self, key: str, rows: slice | None = None) -> torch.Tensor:
        """Return a tensor, or its `rows` with a start and a stop."""
        if len(self.parts[key]) == 1 and rows is None:
            return self.parts[key][0].get_tensor(key)
        if rows is None:
            rows = slice(0, self.shapes[key][0])
        pieces, first = [], 0
        for file in self.parts[key]:
            part = file.get_slice(key)
            size = part.get_shape()[0]
            low, high = max(rows.start - first, 0), min(rows.stop - first, size)
            pieces += [part[low:high]] if low < high else []
            first += size
        return torch.cat(pieces) if pieces else self.parts[key][0].get_tensor(key).new_empty(0, *self.shapes[key][1:])


def load(folder: Path, rows: Callable[[str], slice | None] = lambda key: None) -> tuple[Tensors, dict[str, Any]]:
    """Return the (tensors, state) that `save` wrote; whole tensors, or those rows of a key that `rows` names.

    Raises UserError if they cannot be read.
    """
    try:
        reader = Reader(folder)
        return {key: reader.read(key, rows(key)) for key in reader.shapes}, \
            json.loads((folder / "state.json").read_text())
    except Exception as error:
        raise _unreadable(folder, error) from None


def shapes(folder: Path) -> dict[str, torch.Size]:
    """Return the shapes of a checkpoint's whole tensors. Raises UserError if they cannot be read."""
    try:
        return Reader(folder).shapes
    except Exception as error:
        raise _unreadable(folder, error) from None


def _unreadable(folder: Path, error: Exception) -> UserError:
    earlier = [other.name for other in sorted(folder.parent.glob("epoch-*")) if other.name < folder.name]
    way = f"remove it to go on from {earlier[-1]}" if earlier else \
        "no earlier one is there, begin anew without --resume"
    return UserError(f"the checkpoint {folder} cannot be read ({error}): {way}")


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return an optimiser's state as flat tensors `0.exp_avg`, `0.step`, ...; integers become int64 tensors."""
    return {f"{index}.{key}": torch.as_tensor(value) for index, values in optimizer.state_dict()["state"].items()
            for key, value in _flat(values).items()}


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without bitsandbytes' extra level; its tables are cloned, as a file cannot share them."""
    nested = [inner for value in values.values() if isinstance(value, dict) for inner in value.items()]
    return {key: value for key, value in values.items() if not isinstance(value, dict)} | \
        {key: value.clone() for key, value in nested}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Load the state that `optimizer_tensors` flattened into an optimiser; its groups stay unchanged."""
    state: dict[int, dict[str, torch.Tensor | int]] = {}
    for name, tensor in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = int(tensor) if tensor.dtype == torch.int64 else tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
