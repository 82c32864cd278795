"""Hash of what a call is given: tensors, pictures, arrays and containers of them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch


def digest(value: Any) -> str:
    """Return a hash of the content of tensors, pictures, arrays, and of containers of them."""
    content = hashlib.blake2b(digest_size=16)
    _tell(value, content)
    return content.hexdigest()


def _tell(value: Any, content: hashlib.blake2b) -> None:
    from PIL.Image import Image

    if isinstance(value, (list, tuple)):
        for part in value:
            _tell(part, content)
    elif isinstance(value, dict):
        _tell(sorted(value.items()), content)
    elif torch.is_tensor(value):
        content.update(f"{value.dtype}{tuple(value.shape)}".encode())
        raw: Any = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        content.update(raw)
    elif isinstance(value, (Image, np.ndarray)):
        array = np.ascontiguousarray(value)
        content.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    else:
        content.update(repr(value).encode())
    content.update(b"|")
