"""Contexts of parts that compare with earlier epochs."""

from collections.abc import Sequence
from typing import Any

from flowgrpo.types import Context, PromptGroups, RunState


def of_epoch(prompts: Sequence[str], epoch: int = 0, memory: dict[str, Any] | None = None) -> Context:
    """Context of groups of these prompts. memory: of the epochs before; None: empty."""
    return Context(RunState(epoch, memory={} if memory is None else memory), groups=PromptGroups(prompts))
