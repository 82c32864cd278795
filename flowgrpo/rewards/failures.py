"""What happens where a reward fails: it is told, tried again, or its samples are left out and counted; never a 0.

A failure is whatever the code of a reward raises, an answer that is no score, and no answer in time. A `UserError`
that a reward raises is a person's mistake (a missing package, a wrong setting): it ends the run under every policy.
"""

from __future__ import annotations

import math
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowgrpo.config.reward_rules import Retry
from flowgrpo.errors import UserError

LONGEST_WAIT = 60.0  # seconds between two attempts


class Failed(UserError):
    """A reward raised, answered what is no score, or did not answer in time. A reward may also return one, in place of
    a number, for a sample that it has no answer for."""


class TimedOut(Failed):
    """A reward did not answer in time."""


class Tally:
    """How many samples each reward failed on, and the last thing that each said."""

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()
        self.said: dict[str, str] = {}

    def add(self, name: str, error: Failed) -> None:
        self.failed[name] += 1
        self.said[name] = str(error)


def first_failed(values: Sequence[float | Failed]) -> Failed | None:
    """The first failure among scores."""
    return next((value for value in values if isinstance(value, Failed)), None)


def numbers(values: Sequence[float | Failed]) -> list[float]:
    """The scores among these, NaN in place of failures."""
    return [math.nan if isinstance(value, Failed) else value for value in values]


def settled(ask: Callable[[Sequence[int]], list[float | Failed]], rows: Sequence[int], policy: str | Retry,
            unit: int = 1) -> list[float | Failed]:
    """The scores `ask(rows)` under a failure policy; in place of those of rows that are skipped, why they were.

    policy: "raise"; "skip", which after a failure asks again for every `unit` rows (1, or whole groups) on their own,
    so that only those that fail alone are left out, but not after a time-out, where each would take as long; or a
    `Retry`.
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
        raise last if attempts == 1 else type(last)(f"{last} (asked {attempts} times)") from last
    if len(rows) <= unit or isinstance(last, TimedOut):
        return [last] * len(rows)
    return [value for start in range(0, len(rows), unit)
            for value in settled(ask, rows[start:start + unit], "skip", unit)]


def within(seconds: float | None, told: str, call: Callable[[], Any]) -> Any:
    """What `call` returns, within `seconds` (None: however long it takes); TimedOut, which begins with `told`, after.

    A thread makes the call, so that pictures and models need no copy. It cannot be ended: a call that hangs is
    abandoned, keeps its memory (and a processor, if it is busy) until it returns or the run ends, and does not keep the
    run from ending. A reward that hangs every time leaves one thread behind each time.
    """
    if seconds is None:
        return call()
    from flowgrpo.device import current_gpu, use_gpu  # loads torch

    answers: list[tuple[Any, BaseException | None]] = []
    gpu = current_gpu()

    def work() -> None:
        try:
            use_gpu(gpu)
            answers.append((call(), None))
        except BaseException as error:
            answers.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise TimedOut(f"{told}: no answer within {seconds:g} s")
    value, error = answers[0]
    if error is not None:
        raise error
    return value


def guarded(what: str, call: Callable[..., Any], *arguments: Any, error_type: type[UserError] = UserError,
            **keywords: Any) -> Any:
    """Call the code of others; what it raises becomes a UserError that begins with `what`."""
    try:
        return call(*arguments, **keywords)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise error_type(f"{what}: {told}{_place(error)}") from error


_OURS = tuple(str(Path(__file__).with_name(name)) for name in ("failures.py", "find.py", "gradient.py", "loading.py",
                                                               "score.py"))
_FOREIGN = ("<frozen", *_OURS, *{sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})


def _place(error: BaseException) -> str:
    """The deepest line of a traceback that belongs to no installed package: where the mistake can be mended."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_FOREIGN)]
    if not frames or isinstance(error, SyntaxError):  # a SyntaxError tells its place itself
        return ""
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
