"""Checkpoints: written under a temporary name, then renamed, so a kill never leaves a partial one.

A checkpoint is a folder of safetensors and JSON, never a pickle. Sampling, windows and data order are pure functions of
(seed, epoch). So weights, optimiser, moving average and a few counters are the whole state of a run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

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


def save(folder: Path, epoch: int, tensors: dict[str, torch.Tensor], state: dict[str, Any], keep: int) -> Path:
    """Write `folder/epoch-00042` and delete all but the newest `keep` checkpoints."""
    target = folder / f"epoch-{epoch:05d}"
    temporary = folder / f".{target.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()},
              temporary / STATE)
    paths.readable(temporary)
    (temporary / "state.json").write_text(json.dumps(state, indent=1))
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    for old in sorted(folder.glob("epoch-*"))[:-keep]:
        shutil.rmtree(old)
    return target


def latest(folder: Path) -> Path | None:
    """Return the checkpoint with the highest epoch; None without one."""
    return max(folder.glob("epoch-*"), default=None)


def load(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the (tensors, state) that `save` wrote.

    Raises UserError if they cannot be read.
    """
    try:
        return load_file(folder / STATE), json.loads((folder / "state.json").read_text())
    except Exception as error:
        earlier = [other.name for other in sorted(folder.parent.glob("epoch-*")) if other.name < folder.name]
        way = f"remove it to go on from {earlier[-1]}" if earlier else \
            "no earlier one is there, begin anew without --resume"
        raise UserError(f"the checkpoint {folder} cannot be read ({error}): {way}") from None


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
