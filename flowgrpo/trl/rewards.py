"""Rewards of `trl.rewards` by their names: mathematics, the format of thoughts, and lengths."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from flowgrpo.errors import UserError

THOUGHTS = re.compile(r"<think>(?:(?!<think>).)*?</think>.*", re.DOTALL)


@functools.cache
def _mathematics() -> Any:
    from flowgrpo.text.rewards.numeric import MathAnswer

    return MathAnswer(key="solution")


def accuracy_reward(completions: Sequence[Any], solution: Sequence[str], **_: Any) -> list[float | None]:
    """Return 1 for a completion whose mathematical answer equals the solution's by math-verify, else 0; None for a
    solution that cannot be read."""
    scores: list[float | None] = []
    for completion, key in zip(completions, solution, strict=True):
        try:
            scores += _mathematics()([text(completion)], [""], [{"solution": key}])
        except UserError:
            scores.append(None)
    return scores


def reasoning_accuracy_reward(completions: Sequence[Any], solution: Sequence[str],
                              reasoning_delimiters: Sequence[str] = ("</think>",), **_: Any) -> list[float | None]:
    """Return `accuracy_reward` of what follows the thoughts; 0 for thoughts that do not end."""
    said = [text(completion) for completion in completions]
    after = [next((told.rpartition(mark)[2] for mark in reasoning_delimiters if mark in told), None) for told in said]
    scores = accuracy_reward([told or "" for told in after], solution)
    return [0.0 if told is None and score is not None else score for told, score in zip(after, scores)]


def think_format_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Return 1 for a completion that begins with one <think>...</think>, else 0."""
    return [float(THOUGHTS.fullmatch(text(completion)) is not None and "<think>" not in text(completion)[7:])
            for completion in completions]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """Return DAPO's penalty of lengths in tokens (2503.14476, equation 13): 0 up to max_completion_len -
    soft_punish_cache, then falling to -1 at max_completion_len."""
    def soft_overlong_punishment(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        free = max_completion_len - soft_punish_cache
        return [0.0 if len(ids) <= free else -1.0 if len(ids) > max_completion_len else
                (free - len(ids)) / soft_punish_cache for ids in completion_ids]

    return soft_overlong_punishment


def text(completion: Any) -> str:
    """Return the text of a completion, a string or messages."""
    return str(completion) if isinstance(completion, str) else "".join(turn["content"] or "" for turn in completion)
