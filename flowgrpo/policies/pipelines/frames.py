"""Clips of an evaluation with another number of frames than those of training: `eval.frames`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def clips_of(policy: Any, frames: int | None) -> Iterator[None]:
    """Context manager: the policy's clips have so many frames; None: those of its call."""
    if frames is None:
        yield
        return
    before = dict(policy.call)
    policy.call["num_frames"] = frames
    try:
        yield
    finally:
        policy.call.clear()
        policy.call.update(before)
