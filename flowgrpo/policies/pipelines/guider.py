"""Guidance of a policy for some calls, and of pipelines that have it in a part of their own, the `guider`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def guided(pipe: Any, scale: float) -> Iterator[None]:
    """Context manager: the scale of the pipeline's guider. It does nothing for pipelines without one."""
    guider = pipe.components.get("guider")
    if not hasattr(guider, "guidance_scale"):
        yield
        return
    before = guider.guidance_scale
    guider.guidance_scale = scale
    try:
        yield
    finally:
        guider.guidance_scale = before


@contextlib.contextmanager
def at_guidance(policy: Any, scale: float) -> Iterator[None]:
    """Context manager: the policy predicts at this guidance scale."""
    before, policy.guidance = policy.guidance, scale
    try:
        yield
    finally:
        policy.guidance = before
