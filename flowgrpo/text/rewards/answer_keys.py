"""Helpers of text rewards: the answer that a completion states, and the answer key in a prompt's metadata.

A completion is a model's: any content gets a score, at worst 0. A key is the user's: an unreadable one raises a
one-line UserError. A prompt without the key has no score (None).
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from flowgrpo.errors import UserError
from flowgrpo.escaped import one_line

LICENCE = "Apache-2.0"
Texts = Sequence[str]
Metadata = Sequence[dict[str, Any]]
T = TypeVar("T")

# An answer's label: "answer is", "Answer:", "**Final answer** =", "答案是", or a heading alone on its line; then what
# follows it, on the same line or the next one that is not blank, to the end of the sentence or of its display.
_LABEL = re.compile(
    "(?:(?<![^\\W_])answer(?![^\\W_])[*_`\"')]{0,4}(?:\\s+is\\b|\\s{0,3}[:=\uff1a])"
    "|\u7b54\u6848[*_ ]{0,4}(?:\u5e94\u8be5?|\u5c31)?[\u662f\u4e3a:=\uff1a]"
    "|^[ \\t>#*_]*(?:the\\s+)?(?:final\\s+)?(?:answer|\u7b54\u6848)[ \\t*_#]*$)[ \\t*_`:=\uff1a]*\\s*", re.I | re.M)
_LABELLED = re.compile("\\$\\$.{1,500}?\\$\\$|\\\\\\[.{1,500}?\\\\\\]"
                       "|\\S[^\\n]*?(?=[.!]?[ \\t]{0,8}(?:\\n|\\Z)|\\.\\s|\u3002)", re.S)
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
# The line of GSM8K; a numbered heading is none.
_HASHED_NUMBER = re.compile(r"####(?![ \t]*\d+[.)][ \t]+\D)[ \t]*([-+\u2212$\u20ac\u00a3\\ ]{0,4}[\d.][^\n]*)")
_BRACES = re.compile(r"\\(boxed|fbox)(?:\s*\{|\s+([^\s{}$\\][^{}$\n\\]*))|\\.|[{}]", re.S)
_REASON = re.compile(r"(?<=[\w.)%$*])[,;(\u2014]? ?\(?\b(?:because|since|check)\b.*", re.I | re.S)
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|it|rm|sf|tt)|[mh]box|emph|operatorname)\s*"
                           r"(?=\{)")


def strip_thoughts(text: str) -> str:
    """A completion without its thoughts: the part after the last </think>, up to a <think> never closed.
    The tag with which a `Completion`'s prompt ends belongs to it."""
    return (getattr(text, "opened", "") + text).rpartition("</think>")[2].partition("<think>")[0]


# Blocks of code between fences of CommonMark, at the beginning of a line or with a language; one that is never closed,
# as of a completion cut off, goes to the end.
_FENCED = re.compile(r"(?:^[ \t]*|(?=[`~]{3,}[ \t]*\w))(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*\n(.*?)(?:\1|\Z)",
                     re.S | re.M)


def code_blocks(text: str, *languages: str) -> list[str]:
    """The blocks of code of a text in one of these languages, such as "" and "python", whatever their versions."""
    return [code for _, language, code in _FENCED.findall(text) if language.lower().rstrip("0123456789.") in languages]


def final_answer(text: str) -> str | None:
    """The answer that a completion states, whole; None if it states none.

    It is the first of these that there is, of one kind the last one: the content of <answer> tags, or of a box within;
    of LaTeX's \\boxed, else of its \\fbox; a number behind ####; what is behind "answer is", "answer:" or a heading
    "Answer", there or on the next line, to the end of the sentence; any line behind ####.
    Thoughts (see `strip_thoughts`) do not count.
    """
    return next((answer.strip() for answer in _answers(strip_thoughts(text)) if answer and answer.strip()), None)


def _answers(text: str) -> Iterator[str | None]:
    tagged = answer_tag(text) or ""
    yield last_box(tagged)
    yield tagged
    yield last_box(text)
    yield from _HASHED_NUMBER.findall(text)[-1:]
    for label in reversed([*_LABEL.finditer(text)]):
        if match := _LABELLED.match(text, label.end()):
            answer = match[0].strip("*_` \t")
            yield answer.removeprefix("- ") if "\n" in label[0] else answer  # a list's dash is no sign
            break
    yield from _HASHES.findall(text)[-1:]


def without_reason(text: str) -> str:
    """A text up to a reason in it, ", because 9 * 2 = 18" or " (check: 9 * 2 = 18)"."""
    return _REASON.sub("", text)


def without_commands(text: str) -> str:
    return _TEXT_COMMAND.sub("", text)


_ABSTAINED = re.compile(
    r"\b(?:i|we)\s+(?:really\s+)?(?:do\s+not|don'?t|cannot|can\s?not|can'?t)\s+(?:know|say|tell|answer|determine)\b"
    r"|\b(?:i\s+am|i'?m)\s+(?:not\s+sure|unsure|not\s+certain|unable\s+to\s+(?:say|tell|answer|determine))\b"
    r"|\b(?:cannot|can\s?not|can'?t)\s+be\s+(?:known|determined|answered)\b|\bnot\s+enough\s+information\b"
    r"|\A\W*(?:unknown|unsure|idk|no\s+answer)\W*\Z", re.I)


def abstains(text: str) -> bool:
    """True if a completion says that it does not know: in the answer that it states, or else after its thoughts."""
    statement = final_answer(text)
    return _ABSTAINED.search((strip_thoughts(text) if statement is None else statement).replace("\u2019", "'")
                             ) is not None


def answer_tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>"):end] if start >= 0 else None


def last_box(text: str) -> str | None:
    """The content of the \\boxed that ends last, else of the \\fbox, the innermost of boxes around one another; None if
    none has matching braces. \\boxed 5 goes to the next dollar or the end of the sentence (MATH's rule)."""
    begun: list[tuple[str | None, int, int]] = []
    last: dict[str, str] = {}
    inner, content = (-1, -1), ""  # span and content of the box that was closed last
    for match in _BRACES.finditer(text):
        if match[2]:
            last[match[1]] = match[2].partition(". ")[0].strip(" .")
        elif match[0].endswith("{") and match[0] != "\\{":
            begun.append((match[1], match.start(), match.end()))
        elif match[0] == "}" and begun:
            name, at, start = begun.pop()
            if name:
                around = inner[0] >= start and not (text[start:inner[0]] + text[inner[1]:match.start()]).strip()
                content = content if around else text[start:match.start()]
                last[name], inner = content, (at, match.end())
    return last.get("boxed", last.get("fbox"))


def keys(reward: str, metadata: Metadata, key: str, prompts: Sequence[str],
         read: Callable[[object], T]) -> list[T | None]:
    """`read` of each prompt's entry under `key`; None where there is none.
    Raises UserError that names the reward, the key and the prompt if `read` raises ValueError."""
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


class Keyed:
    """Reward of completions, one by one, by an entry of the prompt's metadata; base class.

    key: of the metadata; a prompt without it has no score. abstain: nor has a completion that says it does not know.
    """

    reward: ClassVar[str]
    key: str
    abstain = False
    keyed = True  # nothing is scored without the key

    def __call__(self, completions: Texts, prompts: Texts, metadata: Metadata) -> list[float | None]:
        known = keys(self.reward, metadata, self.key, prompts, self.read)
        return [None if accepted is None or (self.abstain and abstains(completion)) else self._one(completion, accepted)
                for completion, accepted in zip(completions, known)]

    def read(self, value: object) -> Any:
        """Parse an entry of the metadata. Raises ValueError for none."""
        return several(value)

    def _one(self, completion: str, accepted: Any) -> float:
        raise NotImplementedError


def several(value: object) -> list[str]:
    """An answer key as the texts that it accepts: a text, a number, or a list of these.
    Raises ValueError for any other."""
    accepted = value if isinstance(value, list) else [value]
    if not accepted or not all(type(answer) in (str, int, float) and str(answer).strip() for answer in accepted):
        raise ValueError("expected a text, a number, or a list of these")
    return [str(answer) for answer in accepted]
