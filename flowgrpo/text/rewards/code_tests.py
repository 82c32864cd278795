"""Reward of a completion's Python code: the tests in its prompt's metadata, run within a boundary (sandbox/)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.remote.exchange import side_by_side
from flowgrpo.text.rewards.answer_keys import LICENCE, fenced, keys, spoken
from flowgrpo.text.rewards.sandbox.choose import choose
from flowgrpo.text.rewards.sandbox.kinds import Boundary
from flowgrpo.text.rewards.sandbox.run import Checks, Limits, run


def code_of(text: str) -> str:
    """Return the last block of Python of a completion, or all text after its thoughts if there is none."""
    text = spoken(text)
    blocks = fenced(text, "", "python", "py")
    return blocks[-1] if blocks else text


def read_tests(value: object) -> Checks:
    """Parse the tests in metadata: a list of texts, Python that raises on an error, or of {input, output}.
    Raises ValueError for anything else, and for invalid Python."""
    value = [value] if isinstance(value, str) else value
    if isinstance(value, list) and value:
        if all(isinstance(test, str) for test in value):
            for test in value:
                _require_python(test)
            return Checks(asserts=tuple(value))
        if all(isinstance(test, dict) and test.keys() == {"input", "output"} and
               all(isinstance(text, str) for text in test.values()) for test in value):
            return Checks(pairs=tuple((test["input"], test["output"]) for test in value))
    raise ValueError("expected a list of strings, such as [\"assert f(2) == 4\"], or of {input: text, output: text}")


def _require_python(test: str) -> None:
    try:
        compile(test, "test", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"and {test[:60]!r} in it is not Python ({error})") from None


@dataclass(frozen=True)
class CodeRun:
    """Share of its prompt's tests that a completion's Python code passes, run within a boundary (docs/security.md).

    key: of the metadata, a list of asserts, which see the code's definitions, or of {input, output}, for a program that
    reads standard input and prints; None for a prompt without it.
    strict: 1 if all tests pass, else 0.
    pace: seconds of all tests at which speed counts a half; None: time does not count. With it, code that passes all
    tests scores 1/2 + 1/2 pace / (pace + seconds), other code half its share (ACECode).
    outcomes: 1 if all tests pass, -0.3 if one fails, -0.6 if the code raises by itself, -1 if it does not compile
        (CodeRL). Programs that read standard input are not told to raise.
    seconds: wall-clock time for all asserts of a completion together, or for each pair.
    memory: MiB of a process. files: MiB of its folder and of the printed output.
    workers: completions that run at the same time.
    accept_risk: run without a boundary, as this user, where the machine has none.
    Code that does not compile, raises, or exceeds a limit fails the remaining tests.
    Raises UserError without a boundary, unless `accept_risk`, and for invalid tests.
    """

    key: str = "tests"
    strict: bool = False
    pace: float | None = None
    outcomes: bool = False
    seconds: float = 10.0
    memory: int = 1024
    files: int = 8
    workers: int = 4
    accept_risk: bool = False
    boundary: Boundary = field(init=False)
    about = About(modality="text", range=(-1, 1), needs="", licence=LICENCE)
    keyed = True  # nothing is scored without the key
    privileged = True  # runs code of completions and metadata

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and self.memory >= 64 and self.files >= 1 and self.workers >= 1):
            raise UserError(f"reward 'code_run': got seconds {self.seconds}, memory {self.memory}, files {self.files}, "
                            f"workers {self.workers}, expected above 0, from 64, from 1 and from 1")
        if self.pace is not None and not self.pace > 0:
            raise UserError(f"reward 'code_run': pace is {self.pace}, expected above 0 seconds")
        if self.outcomes and (self.strict or self.pace is not None):
            raise UserError("reward 'code_run': outcomes is true, beside strict or pace: expected one of them")
        if importlib.util.find_spec("resource") is None:
            raise UserError("reward 'code_run' needs the limits of a Unix system: run it there, behind "
                            "`flowgrpo reward serve code_run`")
        object.__setattr__(self, "boundary", choose(self.accept_risk))

    def __call__(self, completions: Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        tests = keys("code_run", metadata, self.key, prompts, read_tests)
        jobs = [(row, checks) for row, checks in enumerate(tests) if checks is not None]

        def share(part: range) -> float:
            row, checks = jobs[part.start]
            return self._share(code_of(completions[row]), checks)

        shares = side_by_side(share, [range(place, place + 1) for place in range(len(jobs))], self.workers)
        scores = {row: value for (row, _), value in zip(jobs, shares)}
        return [scores.get(row) for row in range(len(prompts))]

    def _share(self, code: str, tests: Checks) -> float:
        verdict = run(code, tests, Limits(self.seconds, self.memory, self.files), self.boundary)
        share = sum(verdict.passed) / len(verdict.passed)
        if self.outcomes:
            return 1.0 if share == 1 else self._failed(code, tests)
        share = float(share == 1) if self.strict else share
        return share if self.pace is None else paced(share, verdict.seconds, self.pace)

    def _failed(self, code: str, tests: Checks) -> float:
        """Return the outcome of code that fails a test, from further runs of it."""
        def passes(source: str) -> bool:
            limits = Limits(self.seconds, self.memory, self.files)
            return all(run(source, Checks(asserts=("pass",)), limits, self.boundary).passed)

        if not passes(f"compile({code!r}, 'code', 'exec')"):
            return -1.0
        return -0.3 if tests.pairs or passes(code) else -0.6


def paced(share: float, seconds: float, pace: float) -> float:
    """Return half the share of passed tests, and for code that passes all of them 1/2 + 1/2 pace / (pace + seconds).
    Slow right code scores more than fast wrong code."""
    return share / 2 if share < 1 else 0.5 + 0.5 * pace / (pace + seconds)
