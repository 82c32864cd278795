"""Failures of rewards: report them, retry, or skip and count their samples; never a score of 0.

A failure is any exception in a reward's code, a value that is not a score, or a time-out. A `UserError` from a reward
is the user's mistake (a missing package, a wrong setting): it ends the run under every policy. Errors, and lines that a
reward prints, name it by its label in the recipe.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from flowgrpo.config.reward_rules import Retry
from flowgrpo.distributed.signals import start_thread
from flowgrpo.errors import UserError
from flowgrpo.nouns import quantity

T = TypeVar("T")

LONGEST_WAIT = 60.0  # seconds between two attempts
JUDGE = "a judge"  # how the errors of all judges begin

_present: ContextVar[tuple[str, str | None]] = ContextVar("label", default=("", None))


class Failed(UserError):
    """Failure of a reward: it raised, returned a value that is not a score, or timed out.

    A reward may also return one, in place of a number, for a sample that it cannot score.
    """


class TimedOut(Failed):
    """Time-out of a reward."""


@dataclass
class Tally:
    """Failed samples of each reward, and its last error. errors: those that are reported already too."""

    failed: Counter[str] = field(default_factory=Counter)
    said: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, error: Failed) -> None:
        self.failed[name] += 1
        self.said[name] = self.errors[name] = str(error)


def first_failed(values: Sequence[float | Failed]) -> Failed | None:
    return next((value for value in values if isinstance(value, Failed)), None)


def numbers(values: Sequence[float | Failed]) -> list[float]:
    """NaN in place of failures."""
    return [math.nan if isinstance(value, Failed) else value for value in values]


def score_with_policy(ask: Callable[[Sequence[int]], list[float | Failed]], rows: Sequence[int], policy: str | Retry,
                      unit: int = 1) -> list[float | Failed]:
    """Scores `ask(rows)` under a failure policy; skipped rows hold their failure.

    policy: "raise", "skip" or a `Retry`. After a failure, "skip" asks again for every `unit` rows (1, or whole groups)
    separately, so that only rows that fail alone are skipped; not after a time-out, where each would take as long.
    """
    attempts, then = (1 + policy.retry, policy.then) if isinstance(policy, Retry) else (1, policy)
    for attempt in range(attempts):
        if attempt:
            time.sleep(min(policy.wait * 2 ** (attempt - 1), LONGEST_WAIT))
        try:
            return ask(rows)
        except Failed as error:
            last = error
    if then == "raise":
        raise last if attempts == 1 else type(last)(f"{last} (asked {quantity(attempts, 'time')})") from last
    if len(rows) <= unit or isinstance(last, TimedOut):
        return [last] * len(rows)
    return [value for start in range(0, len(rows), unit)
            for value in score_with_policy(ask, rows[start:start + unit], "skip", unit)]


def within(seconds: float | None, message: str, call: Callable[[], T]) -> T:
    """Result of `call` within `seconds` (None: no limit).

    A thread makes the call, so images and models need no copy. It cannot be killed: a call that hangs is abandoned, and
    keeps its memory until it returns or the run ends, which it does not hinder.
    Raises TimedOut, whose message begins with `message`.
    """
    if seconds is None:
        return call()
    future = start_thread(call)
    if not wait([future], seconds).done:
        raise TimedOut(f"{message}: no answer within {seconds:g} s")
    return future.result()


def with_label(text: str, label: str, use: str | None) -> str:
    """Text that names a reward as its rule does, by `use`, with its label; any other text as it is."""
    if use in (None, label):
        return text
    if text.startswith(named := f"reward {use!r}"):
        return f"reward {label!r} ({use}){text[len(named):]}"
    return f"reward {label!r}: {text}" if text.startswith(JUDGE) else text


@contextmanager
def relabel_errors(label: str, use: str | None) -> Iterator[None]:
    """Context manager: errors have the label of the reward, and so does what `labelled` returns within."""
    token = _present.set((label, use))
    try:
        yield
    except UserError as error:
        error.args = (with_label(str(error), label, use),)
        raise
    finally:
        _present.reset(token)


def labelled(text: str) -> str:
    """`with_label` of a text for the reward that is made."""
    return with_label(text, *_present.get())
