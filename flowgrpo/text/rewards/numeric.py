"""Rewards of a number or a mathematical answer that equals the one in the prompt's metadata.

Numbers are exact fractions. Other mathematics is read by the package math-verify in a process of its own, which is
killed if an answer takes too long.
"""

import ast
import contextlib
import json
import operator
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from flowgrpo.errors import UserError
from flowgrpo.packages import import_optional
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.failures import Failed
from flowgrpo.text.rewards.answer_keys import (
    LICENCE,
    Keyed,
    final_answer,
    several,
    strip_thoughts,
    without_commands,
    without_reason,
)

DIGITS = 300  # a longer number is rejected, and so is a larger power of ten
NODES = 200  # of an expression
BITS = 4096  # of a numerator or denominator inside an expression

_PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,4}(?!\w))?(?!\d)"
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.])(?P<sign>(?<![\w.)%])[-+])?(?:[$\u20ac\u00a3\u00a5]\s?)?"
    r"(?:(?P<whole>\d+)\s+(?P<part>\d+/\d+)(?![\d/]|\.\d)"
    rf"|(?P<over>{_PLAIN})(?:\s?/\s?(?P<under>{_PLAIN})(?!\s?/))?)(?:\s?(?P<percent>%|percent\b))?")
_FRAC = re.compile(r"(?P<whole>\d\s*)?\\[dt]?frac\s*(\{[^{}]*\}|\d)\s*(\{[^{}]*\}|\d)")
_SIGN = re.compile(r"(^|[=:(\u662f\u4e3a]|\b(?:is|equals)\s)\s*([-+])\s+(?=[\d.$])")  # with a space behind it
_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00d7": "*", "\u00b7": "*", "\u22c5": "*", "\u00f7": "/",
                        "\u2044": "/", "\u00a0": " ", "\u202f": " ", "\u2248": "="})
_LATEX = (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/"), ("\\left", ""), ("\\right", ""), ("\\%", "%"),
          ("\\$", ""), ("\\,", ""), ("\\!", ""), ("{,}", ","), ("\\approx", "="), ("\\ ", " "), ("~", " "),
          ("^\\circ", "\u00b0"), ("^{\\circ}", "\u00b0"))
# Mathematics within a line. As in Markdown, no space is inside a dollar, and no digit behind the second one.
_MATHEMATICS = re.compile(r"\$\$.{1,300}?\$\$|\$(?!\s)[^$]{0,300}[^$\s]\$(?!\d)|\\\(.{1,300}?\\\)|\\\[.{1,300}?\\\]")
_AROUND = " *_\"'`$,;:\u3002"
_DELIMITERS = re.compile(r"\\[()\[\]]|(?<!\\)[{}]")
# What makes a number that stands before or behind it a part of other mathematics.
_OPERAND = (re.compile(r"(?:[\u221a^_]\{?|/\(|\\[a-z]+\s?\{|\\(?:sqrt|pi|log|ln|sin|cos|tan)|sqrt\s?\(|\broot of"
                       r"|\d\s?(?:[,;]\s|,?\s(?:or|and)\b))\s*\Z"),
            re.compile(r"\s?(?:[\^_\u221a\u03c0]|\\(?:sqrt|pi|frac|pm))|[abcijknpqrt-z](?![A-Za-z])"))
# What may stand before and behind the number of a statement: words, and a unit. A letter alone is a variable, but for
# units behind a space (m, as math-verify has it, also without one) and "a" before a word.
_OPTION = re.compile(r"\A\(?[A-J]\)?[.):] (?=\S)")
_LEAD = re.compile(r"(?:[^\W\d_]|(?<=\w)-(?=\w)|[\s'\u2019\",:;*$#\uff1a\uff0c])*")
_TAIL = re.compile(
    r"[-,;:(\u2014\uff0c]? ?(?:[^\W\d_]|[\u00b0'\"%$\u20ac\u00a3\u00a5])(?:[^\W\d_]|[\s.,;:'\u2019\"()/*&%-]"
    r"|[\u00b0$\u20ac\u00a3\u00a5\u3001\uff0c\u3002]|\^ ?[23](?!\d)"
    r"|(?:(?<=\bfor )|(?<=\bin )|(?<=\bat )|(?<=\bon )|(?<=\bevery )|(?<=\bafter )|(?<=\bwithin )|(?<=\bnot )"
    r"|(?<=\u4e0d\u662f))\$?\d+(?:[.,]\d+)*)*")
_FACTOR = re.compile(r"(?<![A-Za-z])[A-Za-z]\s*\Z")
_VARIABLE = re.compile(r"(?<![A-Za-z'\u2019.])(?:[bcefijkn-ru-zBDEGHMO-UX-Z](?![A-Za-z'\u2019.])|a(?!\w| \w\w))"
                       r"|\A[A-Za-ln-z](?![A-Za-z])")
_OTHER_LEAD = re.compile(r"\b(?:not|never|neither|nor|except|than|or|root|sqrt|twice|double|triple|times|plus|over"
                         r"|ln|log|sin|cos|tan|(?:half|third|quarter|multiple|factor|power) of)\b|n['\u2019]t\b"
                         r"|[\u4e0d\u975e\u6216\u6839]", re.I)
_OTHER_TAIL = re.compile(r"\b(?:or|root|squared|cubed|factorial|pi|half|halves|thirds?|quarters?)\b"
                         r"|[\u6216\u6839\u03c0]", re.I)


@dataclass(frozen=True)
class Number:
    """Number, and whether a percent sign followed it; `value` then is a hundredth of the written number."""

    value: Fraction
    percent: bool = False

    def equals(self, key: "Number", tolerance: Fraction) -> bool:
        """True if within the tolerance of `key`, scaled by its size if that is above 1. If only one of the two has a
        percent sign, 50 % equals 50 as well as 0.5."""
        once = self.percent != key.percent
        factors: tuple[int | Fraction, ...] = (1, 100 if self.percent else Fraction(1, 100)) if once else (1,)
        size = max(Fraction(1), abs(key.value))
        return any(abs(self.value * factor - key.value) <= tolerance * size for factor in factors)


def plain(text: str) -> str:
    """A text with typographic and LaTeX signs as keyboard ones, signs without a space behind them; \\frac{a}{b} becomes
    (a)/(b), or a/b of two numbers."""
    text = without_commands(text).translate(_SIGNS)
    for latex, sign in _LATEX:
        text = text.replace(latex, sign)
    return _SIGN.sub(r"\1 \2", _FRAC.sub(_slash, text))


def _slash(match: re.Match[str]) -> str:
    parts = [part.strip("{} ") for part in match.group(2, 3)]
    number = re.fullmatch(r"-?[\d.]+", parts[0]) and re.fullmatch(r"[\d.]+", parts[1])
    return (f"{match['whole']} " if match["whole"] else "") + "{}/{}".format(
        *parts if number else (f"({part})" for part in parts))


def last_number(text: str) -> Number | None:
    """The last number in a text: 1,234.5, -7, $18, 2e3, 3/4, 2 1/2, 50 %; None if there is none. The minus of a
    difference, as in 10-3, is not a sign.
    Mathematics that it is in is read as `stated_number` does: \\sqrt{2} and 2x are not 2."""
    text, match = plain(text), None
    for match in _NUMBER.finditer(text):
        pass
    if match is None:
        return None
    start, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
    line, at = text[start:end if end >= 0 else None], match.start() - start
    for written in _MATHEMATICS.finditer(line):
        if written.start() <= at < written.end():
            return stated_number(written[0])
    before = _OPERAND[0].search(text, max(0, match.start() - 20), match.start())
    return None if before or _OPERAND[1].match(text, match.end()) else _number(match)


def stated_number(statement: str) -> Number | None:
    """The number that a statement as a whole is; None for other mathematics, for several numbers and for none.

    It is a number with a unit or words around it ("18 cm", "that she has 18 eggs left"), or the right side of an
    equation whose left side has no number ("x", "m + n", "f(2)") or is arithmetic of that value ("9 * 2 = 18"). A root,
    a power, a multiple of a variable, an interval, a set, a list ("17, 18", "17 or 18"), a compound ("5 feet 3 inches")
    and a denial are none of these. Behind "18 eggs" a second number may follow a preposition, as in "for 2 days":
    GSM8K's rule takes the first one. An option's letter, as in (B) 18, and a reason behind the number are left out.
    """
    text = " ".join(_DELIMITERS.sub(" ", plain(statement)).split())
    text = without_reason(text).rstrip(_AROUND + ".").lstrip(_AROUND)
    if len(text) > 4 * DIGITS:
        return None
    text = _OPTION.sub("", re.sub(r"\b(?:negative|minus) (?=[$\d.])", "-", text), count=1)
    *left, right = (part.strip() for part in (text[1:-1] if re.fullmatch(r"\([^()]*\)", text) else text).split("="))
    match = _NUMBER.search(right)
    if match is None or (number := _number(match)) is None:
        return None
    lead, behind = right[:match.start()], right[match.end():]
    tail = behind.strip(" *\").")
    alone = (_LEAD.fullmatch(lead) and not _OTHER_LEAD.search(lead) and not _FACTOR.search(lead)
             and (not tail or _TAIL.fullmatch(tail)) and not _OTHER_TAIL.search(tail) and not _VARIABLE.search(behind))
    for side in left:  # which names the right side, or is arithmetic of about that value
        named = re.sub(r"_ ?\d+|\( ?\d+ ?\)", "", side)  # an index, an argument
        if not re.search(r"[\d<>!\u2264\u2265\u2260\u221a]", named):
            alone = alone and not _OTHER_LEAD.search(named)
        elif (value := expression(side)) is None or \
                abs(value.value - number.value) > max(Fraction(1), abs(number.value)) / 100:
            return None
    return number if alone else None


def _number(match: re.Match[str]) -> Number | None:
    try:
        over, under = match["part"].split("/") if match["whole"] else (match["over"], match["under"] or "1")
        value = int(match["whole"] or 0) + _decimal(over) / _decimal(under)
    except (ValueError, ZeroDivisionError):
        return None
    value = -value if match["sign"] == "-" else value
    return Number(value / 100, True) if match["percent"] else Number(value)


def _decimal(text: str) -> Fraction:
    """A decimal number, without its thousands separators. Raises ValueError for one that is too long."""
    text = text.replace(",", "")
    _, _, power = text.lower().partition("e")
    if len(text) > DIGITS or abs(int(power or 0)) > DIGITS:
        raise ValueError("too long")
    return Fraction(text)


def expression(text: str) -> Number | None:
    """The exact value of arithmetic with + - * / ** (or ^) and parentheses; None for anything else, for a division by
    zero and for huge numbers. Nothing is executed: the text's syntax tree is walked."""
    if len(text) > 4 * DIGITS:
        return None
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", plain(text).replace("^", "**").replace("$", "")).strip()
    percent = text.endswith("%")
    if not re.fullmatch(r"[\d\s.+*/()eE-]+%?", text):  # of which Python's parser would warn
        return None
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
        left, right = _evaluate_node(node.left, text), _evaluate_node(node.right, text)
        if isinstance(node.op, ast.Pow) and (right.denominator != 1 or abs(right) * _bits(left) > BITS):
            raise ValueError("no whole exponent, or too large")
        value = _OPERATIONS[type(node.op)](left, right)
        if _bits(value) <= BITS:
            return value
    raise ValueError("no arithmetic, or too large")


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
               ast.Pow: operator.pow}


@built_in("numeric_match", "math maths arithmetic correct gsm8k")
class NumericMatch(Keyed):
    """1 if a completion's number equals the one in the metadata, otherwise 0.

    The number is the answer that the completion states (see `answer_keys.final_answer`), read whole as `stated_number`
    does, or the last one in all of it if it states none. Commas separate thousands; 1.234,5 is not read as 1234.5.

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

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise UserError(f"reward 'numeric_match': tolerance is {self.tolerance}, expected from 0 to below 1")

    def read(self, value: object) -> list[Number]:
        return answer_key(value)

    def answer(self, completion: str) -> Number | None:
        statement = final_answer(completion)
        answer, read = (strip_thoughts(completion), last_number) if statement is None else (statement, stated_number)
        return (expression(answer) if self.expressions else None) or read(answer)

    def _one(self, completion: str, accepted: Sequence[Number]) -> float:
        answer, tolerance = self.answer(completion), Fraction(self.tolerance)
        return float(answer is not None and any(answer.equals(key, tolerance) for key in accepted))


def answer_key(value: object) -> list[Number]:
    """An answer key as its numbers. Raises ValueError for a text that is neither a number nor arithmetic."""
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
        self._reader = ThreadPoolExecutor(1)  # waits for lines: a pipe alone has no time limit on every system

    def ask(self, question: Sequence[str | None], seconds: float) -> str | None:
        """The answer to a question; None if none comes within the time, or the process dies of it.
        Raises Failed if the process does not start."""
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                                 text=True, encoding="utf-8", stderr=subprocess.DEVNULL)
                if (answer := self._answer(START)) != "ready":
                    self._end()
                    raise Failed(f"the process {' '.join(self._command[1:])[:200]} does not start ({answer})")
            try:
                self._process.stdin.write(json.dumps(question) + "\n")
                self._process.stdin.flush()
            except OSError:
                self._end()
                return None
            return self._answer(seconds)

    def _answer(self, seconds: float) -> str | None:
        """The next line; None, and the end of the process, if it has none within the time."""
        line = ""
        try:
            with contextlib.suppress(TimeoutError):
                line = self._reader.submit(self._process.stdout.readline).result(seconds)
        finally:
            if not line:
                self._end()
        return json.loads(line) if line else None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):  # input that was never read
                process.stdin.close()
            self._reader.submit(process.stdout.close)


@built_in("math_answer", "maths correct latex math500", eq=False)
class MathAnswer(Keyed):
    """1 if a completion's mathematical answer equals the one in the metadata, by math-verify, otherwise 0.

    The answer is the one that the completion states (see `answer_keys.final_answer`), or else the one that math-verify
    finds after the thoughts. LaTeX, sets, intervals, equations and matrices can be compared; of an equation the right
    side counts if the key is none. Of a number among words, as `stated_number` reads it, the number counts.

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

    def __post_init__(self) -> None:
        if not (self.timeout > 0 and self.memory > 0):
            raise UserError(f"reward 'math_answer': timeout is {self.timeout} and memory {self.memory}, expected both "
                            "above 0")
        import_optional("math_verify", "text", "reward 'math_answer'")
        object.__setattr__(self, "worker", Worker(sys.executable, str(WORKER), str(self.memory), str(self.timeout)))
        object.__setattr__(self, "_readable", set())

    def read(self, value: object) -> list[str]:
        accepted = [latex(text) for text in several(value)]
        for text in accepted:
            if text not in self._readable and self.worker.ask([text, None], self.timeout) != "yes":
                raise ValueError("expected mathematics that math-verify reads, such as 1/2, \\frac{1}{2} or (0, 1]")
            self._readable.add(text)
        return accepted

    def _one(self, completion: str, accepted: Sequence[str]) -> float:
        statement, text = final_answer(completion), strip_thoughts(completion)[-LONGEST:].strip()
        if statement is not None or len(text.split()) == 1:
            # math-verify takes words without \text for variables, and 2 1/2 for 3/2: of a statement that is a number
            # among words, or a mixed one, it gets the number.
            said = without_reason((statement or text)[-LONGEST:]).rstrip(" .")
            said = re.sub(r"(?<=\d)\\[,;:](?=\d{3}(?!\d))", "", said)
            plainly, number = without_commands(said).replace("\\ ", " "), stated_number(said)
            if number and not re.search(r"[\\=]", plainly) and re.search(r"[^\W\d_]|\d\s+\d", plainly):
                said = f"{number.value * 100}\\%" if number.percent else str(number.value)
            answer = latex(said)
        else:  # math-verify finds no number beside a Chinese character, and takes the last one of a list
            answer = re.sub(r"(?<=[\u4e00-\u9fff])(?=[-\d])", " ", text)
            if re.search(r"\d", text) and not re.search(r"[\\$]", text) and last_number(text) is None:
                return 0.0
        return float(any(self.worker.ask([key, answer], self.timeout) == "yes" for key in accepted))


def latex(text: str) -> str:
    """Mathematics in a form that math-verify always finds: in a \\boxed{}, unless it is between dollars."""
    return text if "$" in text.replace("\\$", "") or "\\boxed" in text else f"\\boxed{{{text}}}"
