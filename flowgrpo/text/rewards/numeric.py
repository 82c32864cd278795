"""Reward of a completion's number that equals the one in its prompt's metadata. Numbers are exact fractions."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.text.rewards.answer_keys import LICENCE, abstains, keys, several, spoken, stated

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
        value = _walked(tree.body, text)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return Number(value / 100, True) if percent else Number(value)


def _walked(node: ast.AST, text: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _decimal(ast.get_source_segment(text, node).replace("_", " "))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _walked(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_walked(node.left, text), _walked(node.right, text))
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

    The number is the last one in the answer that the completion marks (see `answer_keys.stated`), or in all of it if it
    marks none. Commas separate thousands; 1.234,5 is not read as 1234.5.

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
        statement = stated(completion)
        answer = spoken(completion) if statement is None else statement
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
