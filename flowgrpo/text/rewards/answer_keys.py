"""Helpers of text rewards: the answer that a completion states, and the answer key in a prompt's metadata.

A completion is a model's: any content gets a score, at worst 0. A key is the user's: an unreadable one raises a
one-line UserError. A prompt without the key has no score (None).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flowgrpo.errors import UserError
from flowgrpo.escaped import one_line

LICENCE = "Apache-2.0"
T = TypeVar("T")

_LABEL = re.compile(r"\b(?:final\s+)?answer\b\W{0,4}?(?:\s+is\b|:|=)[ \t]*(\S[^\n]*?)(?=\.\s|\n|$)", re.I)
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.S)


def strip_thoughts(text: str) -> str:
    """Return a completion without its thoughts: the part after the last </think>, up to a <think> never closed."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


# Blocks of code between fences of CommonMark, at the beginning of a line or with a language; one that is never closed,
# as of a completion cut off, goes to the end.
_FENCED = re.compile(r"(?:^[ \t]*|(?=[`~]{3,}[ \t]*\w))(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*\n(.*?)(?:\1|\Z)",
                     re.S | re.M)


def code_blocks(text: str, *languages: str) -> list[str]:
    """Return the blocks of code of a text in one of these languages, such as "" and "python", whatever their versions.
    """
    return [code for _, language, code in _FENCED.findall(text) if language.lower().rstrip("0123456789.") in languages]


def final_answer(text: str) -> str | None:
    """Return the answer that a completion states: `explicit_answer`, or else the text after its last "answer is",
    "answer:" or "answer =", to the end of the sentence; None if it states none.

    Thoughts (see `strip_thoughts`) do not count.
    """
    text = strip_thoughts(text)
    answer = explicit_answer(text)
    return _last(_LABEL, text) if answer is None else answer


_ABSTAINED = re.compile(
    r"\b(?:i|we)\s+(?:really\s+)?(?:do\s+not|don'?t|cannot|can\s?not|can'?t)\s+(?:know|say|tell|answer|determine)\b"
    r"|\b(?:i\s+am|i'?m)\s+(?:not\s+sure|unsure|not\s+certain|unable\s+to\s+(?:say|tell|answer|determine))\b"
    r"|\b(?:cannot|can\s?not|can'?t)\s+be\s+(?:known|determined|answered)\b|\bnot\s+enough\s+information\b"
    r"|\A\W*(?:unknown|unsure|idk|no\s+answer)\W*\Z", re.I)


def abstains(text: str) -> bool:
    """True if a completion says that it does not know: in the answer that it states, or else after its thoughts."""
    text = text.replace("\u2019", "'")
    statement = final_answer(text)
    return _ABSTAINED.search(strip_thoughts(text) if statement is None else statement) is not None


def explicit_answer(text: str) -> str | None:
    """Return the content of the last <answer> tags, or else of LaTeX's last \\boxed{}, or else of the line after the
    last ####; None if there is none."""
    return next((answer.strip() for answer in (answer_tag(text), last_box(text), _last(_HASHES, text))
                 if answer is not None and answer.strip()), None)


def answer_tag(text: str) -> str | None:
    """Return the content of the last closed <answer>; None if there is none."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>"):end] if start >= 0 else None


def last_box(text: str) -> str | None:
    """Return the content of the \\boxed{...} that ends last; None if none has matching braces."""
    begun: list[tuple[bool, int]] = []
    last = None
    for match in _BRACES.finditer(text):
        if match[0].endswith("{") and match[0] != "\\{":
            begun.append((match[0] != "{", match.end()))
        elif match[0] == "}" and begun:
            is_box, start = begun.pop()
            last = text[start:match.start()] if is_box else last
    return last


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    matches = pattern.findall(text)
    return matches[-1] if matches else None


def keys(reward: str, metadata: Sequence[dict[str, Any]], key: str, prompts: Sequence[str],
         read: Callable[[object], T]) -> list[T | None]:
    """Return `read` of each prompt's entry under `key`; None where there is none.

    Raises UserError that names the reward, the key and the prompt if `read` raises ValueError.
    """
    result: list[T | None] = []
    for entry, prompt in zip(metadata, prompts):
        value = entry.get(key)
        try:
            result.append(None if value is None else read(value))
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"reward {reward!r}: metadata.{key} is {one_line(repr(value)[:120])}, {one_line(error)} "
                            f"(prompt: {one_line(prompt[:80])!r})") from None
    return result


def several(value: object) -> list[str]:
    """Return an answer key as the texts that it accepts: a text, a number, or a list of these.
    Raises ValueError for any other."""
    accepted = value if isinstance(value, list) else [value]
    if not accepted or not all(type(answer) in (str, int, float) and str(answer).strip() for answer in accepted):
        raise ValueError("expected a text, a number, or a list of these")
    return [str(answer) for answer in accepted]
