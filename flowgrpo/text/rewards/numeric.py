"""Rewards of a number or a mathematical answer that equals the one in the prompt's metadata.

Numbers are exact fractions. Other mathematics is read by the package math-verify in a process of its own, which is
killed if an answer takes too long.
"""

from __future__ import annotations

import ast
import contextlib
import json
import operator
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import IO, Any

from flowgrpo.errors import UserError
from flowgrpo.packages import import_optional
from flowgrpo.rewards.about import About
from flowgrpo.rewards.failures import Failed
from flowgrpo.text.rewards.answer_keys import (
    LICENCE,
    abstains,
    explicit_answer,
    final_answer,
    keys,
    several,
    strip_thoughts,
)

DIGITS = 300  # a longer number is rejected, and so is a larger power of ten
NODES = 200  # of an expression
BITS = 4096  # of a numerator or denominator inside an expression

_PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,4}(?!\w))?(?!\d)"
_NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>(?<![\w.)%])[-+])?(?:[$\u20ac\u00a3]\s?)?"
    r"(?:(?P<whole>\d+)\s+(?P<part>\d+/\d+)(?![\d/]|\.\d)"
    rf"|(?P<over>{_PLAIN})(?:\s?/\s?(?P<under>{_PLAIN})(?!\s?/))?)(?:\s?(?P<percent>%|percent\b))?")
_FRAC = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00d7": "*", "\u00b7": "*", "\u22c5": "*", "\u00f7": "/",
                        "\u2044": "/", "\u00a0": " ", "\u202f": " "})
_LATEX = (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/"), ("\\left", ""), ("\\right", ""), ("\\%", "%"),
          ("\\$", ""), ("\\,", ""), ("\\!", ""), ("{,}", ","))

@dataclass(frozen=True)
class Number:
    """Number, and whether a percent sign followed it; `value` then is a hundredth of the written number."""

    value: Fraction
    percent: bool = False

    def equals(self, key: Number, tolerance: Fraction) -> bool:
        """True if within the tolerance of `key`, scaled by its size if that is above 1. If only one of the two has a
        percent sign, 50 % equals 50 as well as 0.5."""
        once = self.percent != key.percent
        factors: tuple[int | Fraction, ...] = (1, 100 if self.percent else Fraction(1, 100)) if once else (1,)
        size = max(Fraction(1), abs(key.value))
        return any(abs(self.value * factor - key.value) <= tolerance * size for factor in factors)


def plain(text: str) -> str:
    """Return a text with typographic and LaTeX signs as keyboard ones; \\frac{a}{b} becomes (a)/(b), or a/b of two
    numbers."""
    text = text.translate(_SIGNS)
    for latex, sign in _LATEX:
        text = text.replace(latex, sign)
    return _FRAC.sub(lambda match: "{}/{}".format(*(part if re.fullmatch(r"[\d.]+", part) else f"({part})"
                                                    for part in match.groups())), text)


def last_number(text: str) -> Number | None:
    """Return the last number in a text: 1,234.5, -7, $18, 2e3, 3/4, 2 1/2, 50 %; None if there is none. The minus of a
    difference, as in 10-3, is not a sign."""
    match = None
    for match in _NUMBER.finditer(plain(text)):
        pass
    return None if match is None else _number(match)


def _number(match: re.Match[str]) -> Number | None:
    try:
        value = (int(match["whole"]) + _fraction(*match["part"].split("/")) if match["whole"] else
                 _fraction(match["over"], match["under"] or "1"))
    except (ValueError, ZeroDivisionError):
        return None
    value = -value if match["sign"] == "-" else value
    return Number(value / 100, True) if match["percent"] else Number(value)


def _fraction(over: str, under: str) -> Fraction:
    return _decimal(over) / _decimal(under)


def _decimal(text: str) -> Fraction:
    """Return a decimal number, without its thousands separators.
    Raises ValueError for one that is too long."""
    text = text.replace(",", "")
    _, _, power = text.lower().partition("e")
    if len(text) > DIGITS or abs(int(power or 0)) > DIGITS:
        raise ValueError("too long")
    return Fraction(text)


def expression(text: str) -> Number | None:
    """Return the exact value of arithmetic with + - * / ** (or ^) and parentheses; None for anything else, for a
    division by zero and for huge numbers. Nothing is executed: the text's syntax tree is walked."""
    if len(text) > 4 * DIGITS:
        return None
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", plain(text).replace("^", "**").replace("$", "")).strip()
    percent = text.endswith("%")
    try:
        tree = ast.parse(text.removesuffix("%").strip(), mode="eval")
        if sum(1 for _ in ast.walk(tree)) > NODES:
            return None
        value = _evaluate_node(tree.body, text)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return Number(value / 100, True) if percent else Number(value)


def _evaluate_node(node: ast.AST, text: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _decimal(ast.get_source_segment(text, node).replace("_", " "))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _evaluate_node(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_evaluate_node(node.left, text), _evaluate_node(node.right, text))
        if _bits(value) <= BITS:
            return value
    raise ValueError("no arithmetic, or too large")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) * _bits(base) > BITS:
        raise ValueError("no whole exponent, or too large")
    return base ** int(exponent)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
               ast.Pow: _power}


@dataclass(frozen=True)
class NumericMatch:
    """1 if a completion's number equals the one in the metadata, otherwise 0.

    The number is the last one in the answer that the completion marks (see `answer_keys.final_answer`), or in all of it
    if it marks none. Commas separate thousands; 1.234,5 is not read as 1234.5.

    key: of the metadata, a number, arithmetic as in `expression`, or a list of accepted ones; None for a prompt without
    it.
    tolerance: the largest difference, times the key if that is above 1.
    expressions: accept arithmetic as an answer; leave it off if the prompt holds some, which could be copied unsolved.
    abstain: as in `exact_match`.
    """

    key: str = "answer"
    tolerance: float = 1e-9
    expressions: bool = False
    abstain: bool = False
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)
    keyed = True  # nothing is scored without the key

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise UserError(f"reward 'numeric_match': tolerance is {self.tolerance}, expected from 0 to below 1")

    def __call__(self, completions: Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        references = keys("numeric_match", metadata, self.key, prompts, answer_key)
        return [None if accepted is None or (self.abstain and abstains(completion)) else self._one(completion, accepted)
                for completion, accepted in zip(completions, references)]

    def answer(self, completion: str) -> Number | None:
        """Return the number that a completion answers; None if there is none."""
        statement = final_answer(completion)
        answer = strip_thoughts(completion) if statement is None else statement
        return (expression(answer) if self.expressions else None) or last_number(answer)

    def _one(self, completion: str, accepted: Sequence[Number]) -> float:
        answer, tolerance = self.answer(completion), Fraction(self.tolerance)
        return float(answer is not None and any(answer.equals(key, tolerance) for key in accepted))


def answer_key(value: object) -> list[Number]:
    """Return an answer key as its numbers.
    Raises ValueError for a text that is neither a number nor arithmetic."""
    numbers = []
    for text in several(value):
        whole = _NUMBER.fullmatch(plain(text).strip())
        number = (whole and _number(whole)) or expression(text)
        if number is None:
            raise ValueError("expected a number, arithmetic, or a list of these")
        numbers.append(number)
    return numbers


WORKER = Path(__file__).with_name("math_worker.py")
START = 300.0  # seconds for the process to be ready: it imports sympy
LONGEST = 20_000  # characters at the end of a completion that are searched for its answer


class Worker:
    """Process that answers each JSON line with one; killed and restarted if an answer takes too long."""

    def __init__(self, *command: str) -> None:
        self._command, self._lock = command, threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def ask(self, question: Sequence[str | None], seconds: float) -> str | None:
        """Return the answer to a question; None if none comes within the time, or the process dies of it.
        Raises Failed if the process does not start."""
        with self._lock:
            if self._process is None:
                self._start()
            try:
                self._process.stdin.write(json.dumps(question) + "\n")
                self._process.stdin.flush()
            except OSError:
                self._end()
                return None
            answer = self._answer(seconds)
            if not answer:
                self._end()
            return answer or None

    def _start(self) -> None:
        self._answers = queue.Queue()
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                         encoding="utf-8", stderr=subprocess.DEVNULL)
        threading.Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True).start()
        if (answer := self._answer(START)) != "ready":
            self._end()
            raise Failed(f"the process {' '.join(self._command[1:])[:200]} does not start ({answer})")

    def _answer(self, seconds: float) -> str | None:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            return None
        return json.loads(line) if line else None

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # input that was never read
            self._process.stdin.close()
        self._process = None


def _read(lines: IO[str], answers: queue.Queue[str]) -> None:
    """Put each line into the queue, and "" at the end."""
    with lines:
        for line in lines:
            answers.put(line)
    answers.put("")


@dataclass(frozen=True, eq=False)
class MathAnswer:
    """1 if a completion's mathematical answer equals the one in the metadata, by math-verify, otherwise 0.

    The answer is the one that the completion marks (see `answer_keys.explicit_answer`: tags, \\boxed{}, ####), or else
    the one that math-verify finds after the thoughts. LaTeX, sets, intervals, equations and matrices can be compared.

    key: of the metadata, LaTeX with or without $, a number, or a list of accepted ones; None for a prompt without it.
    timeout: seconds for one answer, which scores 0 after that. memory: of the process, in MiB.
    abstain: as in `exact_match`.
    Raises UserError for a key that math-verify cannot read.
    """

    key: str = "answer"
    timeout: float = 5.0
    memory: int = 2048
    abstain: bool = False
    worker: Worker = field(init=False, repr=False)
    _readable: set[str] = field(init=False, repr=False)
    about = About(modality="text", range=(0, 1), needs="text", licence="Apache-2.0, MIT packages")
    keyed = True  # nothing is scored without the key

    def __post_init__(self) -> None:
        if not (self.timeout > 0 and self.memory > 0):
            raise UserError(f"reward 'math_answer': timeout is {self.timeout} and memory {self.memory}, expected both "
                            "above 0")
        import_optional("math_verify", "text", "reward 'math_answer'")
        object.__setattr__(self, "worker", Worker(sys.executable, str(WORKER), str(self.memory),
                                                  str(self.timeout)))
        object.__setattr__(self, "_readable", set())

    def __call__(self, completions: Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        references = keys("math_answer", metadata, self.key, prompts, self._key_as_latex)
        return [None if accepted is None or (self.abstain and abstains(completion)) else self._one(completion, accepted)
                for completion, accepted in zip(completions, references)]

    def _key_as_latex(self, value: object) -> list[str]:
        """Return an answer key as LaTeX.
        Raises ValueError if math-verify cannot read it."""
        accepted = [latex(text) for text in several(value)]
        for text in accepted:
            if text not in self._readable and self.worker.ask([text, None], self.timeout) != "yes":
                raise ValueError("expected mathematics that math-verify reads, such as 1/2, \\frac{1}{2} or (0, 1]")
            self._readable.add(text)
        return accepted

    def _one(self, completion: str, accepted: Sequence[str]) -> float:
        text = strip_thoughts(completion)[-LONGEST:]
        statement = explicit_answer(text)
        answer = text if statement is None else latex(statement)
        return float(any(self.worker.ask([key, answer], self.timeout) == "yes" for key in accepted))


def latex(text: str) -> str:
    """Return mathematics in a form that math-verify always finds: in a \\boxed{}, unless it is between dollars."""
    return text if "$" in text.replace("\\$", "") or "\\boxed" in text else f"\\boxed{{{text}}}"
