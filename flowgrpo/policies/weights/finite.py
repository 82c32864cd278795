"""NaN and infinities in trained weights: refused before weights are saved, and when they are read.

A file that is read may also hold other numbers than weights, numbers beyond LARGEST, and halves of a LoRA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from flowgrpo.distributed.shards import local
from flowgrpo.errors import UserError
from flowgrpo.files import tensors_of

INTEGERS = ("alpha", "position_ids", "num_batches_tracked")  # ends of names of tensors that may hold integers
NO_NUMBERS = (torch.bool, torch.complex32, torch.complex64, torch.complex128)
LARGEST = 1e6  # of a weight; those of trained adapters are below 100
SIDES = [(one, other) for names in ((".lora_A.", ".lora_B."), (".lora_down.", ".lora_up.")) for one, other in
         (names, names[::-1])]


@torch.no_grad()
def odd(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor that holds NaN or an infinity; None if all are finite.

    Of a sharded one this process's rows are read.
    """
    floats = {key: local(tensor) for key, tensor in tensors.items() if tensor.is_floating_point()}
    flags = [(value.float() if value.element_size() == 1 else value).isfinite().all() for value in floats.values()]
    if not flags:
        return None
    known = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()  # the host waits once
    return next((key for key, finite in zip(floats, known) if not finite), None)


def require_saved(tensors: Mapping[str, torch.Tensor], epoch: int, anywhere: Callable[[bool], bool] = bool) -> None:
    """Raise UserError if weights that are to be saved are not finite. anywhere: if a flag is set on any process."""
    key = odd(tensors)
    if anywhere(key is not None):
        where = f"such as {key}" if key else "on another process"
        raise UserError(f"the trained weights are not finite after epoch {epoch} ({where}): they are not saved, and "
                        "earlier checkpoints stay: lower train.lr or train.clip_grad, and --resume or begin anew")


def require_read(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise UserError if weights that were read from a path are no real numbers, not finite, or above LARGEST."""
    if key := odd(tensors):
        raise UserError(f"{path}: {key} holds NaN or an infinity, expected finite weights: take those of an earlier "
                        "checkpoint")
    for key, tensor in tensors.items():
        if not (tensor.is_floating_point() or key.endswith(INTEGERS) and tensor.dtype not in NO_NUMBERS):
            raise UserError(f"{path}: {key} is of {str(tensor.dtype).removeprefix('torch.')}, expected weights in "
                            "float32, float16 or bfloat16: is it another file?")
        values = local(tensor)
        if tensor.is_floating_point() and values.numel() and (most := float(
                (values.float() if values.element_size() == 1 else values).abs().max())) > LARGEST:
            raise UserError(f"{path}: {key} holds {most:.1e}, expected weights up to {LARGEST:.0e}: the training "
                            "diverged, take those of an earlier checkpoint")


def require_file(path: Path, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
    """Raise UserError if a LoRA's file holds weights that are not finite, or a layer with one side alone.

    tensors: of the file, if it has been read.
    """
    tensors = tensors_of(path)[0] if tensors is None else tensors
    require_read(path, tensors)
    for key in tensors:
        for side, other in SIDES:
            if side in key and (absent := key.replace(side, other)) not in tensors:
                raise UserError(f"{path}: a LoRA with {key}, but without {absent}: expected both sides of every layer")
