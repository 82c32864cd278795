"""Parsers of a judge's answer: a score, a verdict on two, or a level; None if it states none.

All functions are pure. An answer is untrusted text: reasoning before it (`<think>`), fences, markup and prose around it
are skipped. A number outside its range, a refusal or two contradicting answers count as no answer.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flowgrpo.errors import UserError

LONGEST = 10_000  # characters of an answer that are read, from its end
LEVELS = {"excellent": 5.0, "good": 4.0, "fair": 3.0, "poor": 2.0, "bad": 1.0}
Range = tuple[float, float]

_NUMBER = r"(?<!\d)(-?\d{1,9}(?:\.\d{1,9})?)(?!\d|e[+-]?\d)(?![.,]\d)(?!\s{0,3}(?:to|-|–)\s{0,3}\d)"
_OF = rf"{_NUMBER}(?:\s*(?:/|out\s+of)\s*(\d+(?:\.\d+)?))?"
_LABEL = r"\b(?:score|rating|mark|grade)\b(?:\s*\([^)]{0,40}\))?\s*(?::|=|is\b|of\b|[-–]\s)?\s*"
_LAST_LABEL = re.compile(rf"\b(?:final|overall|total)\s+{_LABEL}{_OF}", re.I)
_LABELLED = re.compile(_LABEL + _OF, re.I)
_FRACTION = re.compile(rf"{_NUMBER}\s*(?:/|out\s+of)\s*(\d+(?:\.\d+)?)", re.I)
_ALONE = re.compile(rf"{_OF}\s*[.!]?", re.I)
_REFUSAL = re.compile(
    r"\W*(?:(?:(?:i'm|i am)\s+(?:very\s+|really\s+)?)?sorry\b|i apologi[sz]e|as an ai\b|(?:i (?:can't|cannot|can not|"
    r"won't|will not)|(?:i'm|i am) (?:unable|not able) to)\s+(?:help|assist|rate|score|judge|evaluate|assess|comply|"
    r"provide|answer|view|see (?:the|this|an?|any) (?:image|picture|video)))", re.I)
_FORMS = ("expected `score in [0, 10]`, `json KEY`, `json KEY in [0, 10]`, or a regular expression with one group "
          "around the number")


def parser(parse: str, scale: Sequence[float] | None = None) -> Callable[[str], float | None]:
    """Parser, text -> score, for `parse`: "score in [lo, hi]", "json KEY", "json KEY in [lo, hi]", or a regular
    expression whose group is the number and whose last match counts. scale: lowest and highest mark, mapped to 0 and 1;
    others are no answer.
    Raises UserError for any other `parse`.
    """
    low_high = None if scale is None else _range(scale, "scale")
    read, limits = _reader(parse)

    def parse_score(text: str) -> float | None:
        value = None if declines(text) else read(text, limits or low_high)
        if value is None or not math.isfinite(value) or not all(
                known is None or known[0] <= value <= known[1] for known in (limits, low_high)):
            return None
        return value if low_high is None else (value - low_high[0]) / (low_high[1] - low_high[0])

    return parse_score


def strip_reasoning(text: str) -> str:
    """Answer without the reasoning before it; empty if that never ended."""
    text = text[-LONGEST:].rpartition("</think>")[2]
    return "" if "<think>" in text else text.strip()


def conclusion(text: str) -> str:
    """Conclusion of an answer: without reasoning and markup, inside its last <answer> if there is one."""
    text = strip_reasoning(text).replace("\u2019", "'")
    inner = re.findall(r"<answer>(.*?)</answer>", text, re.S | re.I)
    return re.sub(r"`|\*\*|__|(?<!\w)[*_](?=\w)|(?<=\w)[*_](?!\w)", "", inner[-1] if inner else text).strip()


def declines(text: str) -> bool:
    """True if an answer begins by declining to judge."""
    return _REFUSAL.match(conclusion(text)) is not None


# --- one output ------------------------------------------------------------------------------------------------------

def _reader(parse: str) -> tuple[Callable[[str, Range | None], float | None], Range | None]:
    """Reader of a score, and the range that `parse` states."""
    form = re.fullmatch(r"(score|json\s+\S+)(?:\s+in\s*(\[.*\]))?", parse.strip())
    if form and (form[2] or form[1] != "score"):
        values = None
        with contextlib.suppress(ValueError):
            values = json.loads(form[2] or "null")
        limits = _range(values, parse) if form[2] else None
        key = form[1].partition("json")[2].strip()
        return lambda text, known: (_read_key(conclusion(text), (key,), known) if key else
                                    _read_score(conclusion(text), known)), limits
    last = _last(parse, _FORMS)
    return lambda text, known: _number(last(text), known), None


def _last(parse: str, forms: str) -> Callable[[str], str | None]:
    """Function, text -> what a regular expression's one group holds in its last match; None without one."""
    try:
        pattern = re.compile(parse, re.S)
    except re.error as error:
        raise UserError(f"a judge's parse is {parse!r}, which is no regular expression ({error}): {forms}") from None
    if pattern.groups != 1:
        raise UserError(f"a judge's parse is {parse!r}, which has {pattern.groups} groups: {forms}")
    return lambda text: next(reversed(pattern.findall(strip_reasoning(text))), None)


def _range(values: Any, source: str) -> Range:
    pair = isinstance(values, (list, tuple)) and len(values) == 2
    if not pair or not all(type(value) in (int, float) for value in values) or not values[0] < values[1]:
        raise UserError(f"a judge's range is {values!r} (in {source!r}), expected [lowest, highest], such as [0, 10]")
    return float(values[0]), float(values[1])


def _read_score(text: str, known: Range | None) -> float | None:
    """Score in prose: under a key, after a label ("Final Score: 8"), as a fraction, or alone on an outer line."""
    if (value := _read_key(text, ("final_score", "overall_score", "score", "rating", "mark"), known)) is not None:
        return value
    for pattern in (_LAST_LABEL, _LABELLED, _FRACTION):
        if matches := pattern.findall(text):
            number, whole = matches[-1]
            return _mark(number, whole, known)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in (*lines[-1:], *lines[:1]):
        if match := _ALONE.fullmatch(line):
            return _mark(match[1], match[2], known)
    return None


def _mark(number: str, whole: str | None, known: Range | None) -> float | None:
    return None if whole and known and float(whole) != known[1] else float(number)


def _read_key(text: str, keys: Sequence[str], known: Range | None) -> float | None:
    every = list(objects(text))
    for key in keys:
        if values := [record[key] for record in every if key in record]:
            return _number(values[-1], known)
    return None


def _number(value: object, known: Range | None) -> float | None:
    if isinstance(value, str):
        match = _ALONE.fullmatch(value.strip())
        marks: dict[bool | None, float] = {True: 1.0, False: 0.0}
        return _mark(match[1], match[2], known) if match else marks.get(yes(value))
    return float(value) if isinstance(value, (bool, int)) and abs(value) < 2**53 or isinstance(value, float) else None


_WORDS = {**dict.fromkeys(("yes", "true", "1", "met", "fulfilled", "satisfied", "pass", "passed"), True),
          **dict.fromkeys(("no", "false", "0", "not met", "unmet", "fail", "failed"), False)}


def yes(value: object) -> bool | None:
    """True for a word that says yes, False for one that says no, None for any other value."""
    return _WORDS.get(" ".join(str(value).lower().strip(" .\"'").split()))


def objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a text and those inside them, in order, whatever surrounds them."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
            yield from _inner(value)
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)


def _inner(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from _inner(item)


# --- two outputs -----------------------------------------------------------------------------------------------------

_NOUN = r"(?:image|picture|video|clip|output|answer|response|option|candidate|text)"
_ONE = (rf"(?:{_NOUN}\s*\#?\s*(?P<{{0}}>1|2|one|two|(?-i:[AB]))\b"
        rf"|(?:the\s+)?(?P<{{1}}>first|second)\b(?:\s+(?:{_NOUN}|one))?)")
_TIE = r"(?:tie\b|tied\b|draw\b|equal(?:ly)?\b|both\b|neither\b|same\b)"
_SAID = re.compile(
    _ONE.format("a", "b") + r"\s+(?:is|wins|looks)\b\s*(?:(?:clearly|slightly|much|overall|significantly|marginally|"
    r"far|the|definitely)\s+)*(?P<how>better|superior|best|preferred|preferable|winner|worse|inferior)?"
    r"|(?:winner|better(?:\s+\w+)?|preferred(?:\s+\w+)?|verdict|answer|choice|preference)\s*(?:is|:|=)\s*[\[\"'(]*(?:"
    + _ONE.format("c", "d") + r"|(?P<e>1|2|(?-i:[AB]))\b|(?P<tie1>" + _TIE + r"))"
    r"|(?P<tie2>both\s+(?:\w+\s+)?(?:are|look)\s+(?:equal|equally|similar|the\s+same)|equally\s+(?:good|bad)|"
    r"\ba\s+(?:tie|draw)\b)", re.I)
_SIDE = re.compile(r"[\[\"'(\s]*(?:" + _ONE.format("a", "b") + r"|(?P<c>1|2|(?-i:[AB]))\b|(?P<tie>" + _TIE
                   + r")[^.]{0,40})[\]\"')\s.]*", re.I)
_FIRST = {"1": 1.0, "one": 1.0, "a": 1.0, "first": 1.0, "2": 0.0, "two": 0.0, "b": 0.0, "second": 0.0}
_KEYS = ("better", "winner", "preferred", "verdict", "choice", "answer")


def verdict(text: str) -> float | None:
    """1 if an answer prefers the first of two, 0 the second, 0.5 for a tie; the last statement counts."""
    if declines(text):
        return None
    text = conclusion(text)
    choices = [record[key] for record in objects(text) for key in _KEYS if key in record]
    if choices:
        return _side(str(choices[-1]))
    if (alone := _side(text)) is not None:
        return alone
    said = [value for value in map(_preference, _SAID.finditer(text)) if value is not None]
    return said[-1] if said else None


def verdict_parser(parse: str) -> Callable[[str], float | None]:
    """Parser, text -> 1, 0, 0.5 or None, for "verdict", or for a regular expression whose group names one of the two
    (1, 2, A, B, first, second), or a tie.
    Raises UserError for neither."""
    if parse == "verdict":
        return verdict
    last = _last(parse, "expected `verdict`, or a regular expression with one group around 1, 2, A, B or tie")
    return lambda text: None if declines(text) else _side(last(text) or "")


def _side(text: str) -> float | None:
    """Read a text that only names one of the two, or a tie."""
    match = _SIDE.fullmatch(text)
    if match is None:
        return None
    return 0.5 if match["tie"] else _FIRST[(match["a"] or match["b"] or match["c"]).lower()]


def _preference(match: re.Match[str]) -> float | None:
    if match["tie1"] or match["tie2"]:
        return 0.5
    subject, named = match["a"] or match["b"], match["c"] or match["d"] or match["e"]
    if named:
        return _FIRST[named.lower()]
    wins = re.search(r"\bwins\b", match[0], re.I)
    if not (match["how"] or wins):
        return None
    first = _FIRST[subject.lower()]
    return 1 - first if (match["how"] or "").lower() in ("worse", "inferior") else first


# --- levels ----------------------------------------------------------------------------------------------------------

def level(text: str) -> float | None:
    """Value of the one level that an answer names: excellent 5, good 4, fair 3, poor 2, bad 1."""
    words = set(re.findall(rf"(?<!not )\b({'|'.join(LEVELS)})\b", "" if declines(text) else conclusion(text).lower()))
    return LEVELS[words.pop()] if len(words) == 1 else None


def expected_level(tokens: Sequence[tuple[str, Mapping[str, float]]]) -> float | None:
    """Mean of the levels under their probabilities, normalised over the five (DeQA-Score, 2501.11561; Q-Align,
    2312.17090), at the first token that names one; None if there is none.

    tokens: those of an answer, each with its likeliest alternatives and their log-probabilities; a missing level counts
    as improbable. A token may be a level's beginning of two letters or more.
    """
    for token, alternatives in tokens:
        if _begins(token) is None:
            continue
        mass = {value: 0.0 for value in LEVELS.values()}
        for other, logarithm in alternatives.items():
            if (value := _begins(other)) is not None:
                mass[value] += math.exp(min(logarithm, 0.0))
        total = sum(mass.values())
        return sum(value * weight for value, weight in mass.items()) / total if total > 0 else None
    return None


def _begins(token: str) -> float | None:
    word = token.strip(" \u0120\u2581").lower()
    return next((value for name, value in LEVELS.items() if len(word) >= 2 and name.startswith(word)), None)
