"""Trial of users' functions on a grey clip, before a video model is loaded: one that judges pictures fails at once."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.compose import Composed
from flowgrpo.rewards.reward import about
from flowgrpo.rewards.score import score

FRAMES, SIDE = 5, 32  # of the clip


def require_clips(rewards: Mapping[str, Composed], prompt: str, metadata: dict[str, Any]) -> None:
    """Raise UserError for a function that fails on a clip [1, F, 3, H, W] and scores a picture.

    Functions that state their modality are not called, nor are objects. prompt, metadata: of a sample.
    """
    for name, reward in rewards.items():
        if not inspect.isfunction(reward.function) or about(reward.function).modality is not None:
            continue
        given = [prompt], [metadata]
        failed = _failure(reward, (1, FRAMES, 3, SIDE, SIDE), *given)
        if failed is not None and _failure(reward, (1, 3, SIDE, SIDE), *given) is None:
            used = reward.rule.use or name
            raise UserError(f"reward {name!r} judges pictures, but what is generated here is video ({failed}): score "
                            f'its frames, reward: {{{_short(used)}: {{use: frames, args: {{reward: "{used}"}}}}}}')


def _failure(reward: Composed, shape: tuple[int, ...], prompts: Sequence[str], metadata: list[dict[str, Any]]
             ) -> str | None:
    """Return why a reward does not score a grey sample of this shape; None if it does."""
    import torch

    try:
        score({"it": Composed(reward.function)}, torch.full(shape, 0.5), prompts, copy.deepcopy(metadata))
    except UserError as error:
        return str(error).removeprefix("reward 'it' ")
    return None


def _short(name: str) -> str:
    """Return the name of a function, without its file."""
    return name.rpartition(":")[2]
