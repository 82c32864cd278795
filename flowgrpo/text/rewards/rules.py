"""Rules for completions: exact answers, choices, tag formats, steps, repetition, length, translations (BLEU, chrF)."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, ClassVar

from flowgrpo.errors import UserError
from flowgrpo.escaped import one_line
from flowgrpo.packages import import_optional
from flowgrpo.rewards.about import About, built_in
from flowgrpo.text.rewards.answer_keys import (
    LICENCE,
    Keyed,
    Metadata,
    Texts,
    final_answer,
    several,
    strip_thoughts,
    without_commands,
    without_reason,
)

OUTER = " \t\n\r.,;:!?\"'`*_$\\()[]{}\u00ab\u00bb\u2018\u2019\u201c\u201d\u3002"


def normalise(text: str, case: bool = False) -> str:
    """A text in NFKC, its spaces single, without punctuation, quotes, Markdown and LaTeX's text commands around it, and
    without a space behind its sign; in lower case unless `case` matters. A text of only punctuation stays."""
    text = " ".join(unicodedata.normalize("NFKC", without_commands(text)).replace("\u2212", "-").split())
    text = re.sub(r"(?<![\w.])\.(?=\d)", "0.", text)
    inner = text.strip(OUTER)
    if "," in inner:  # whose brackets mean something: [0, 1] is not (0, 1)
        inner = text.strip(re.sub(r"[()\[\]{}\\]", "", OUTER))
    text = re.sub(r"^([-+]) (?=[\d.])", r"\1", inner) or text
    return text if case else text.casefold()


@built_in("exact_match", "correct answer equal")
class ExactMatch(Keyed):
    """1 if a completion's answer equals the one in the metadata after normalising, otherwise 0.

    key: of the metadata, a text, a number or a list of accepted ones; None for a prompt without it.
    extract: compare the answer that the completion states (see `answer_keys.final_answer`), or the text after its
    thoughts if it states none; false: always all of it.
    case: upper and lower case differ.
    abstain: a completion that says it does not know scores None, 0 of a `ternary` (TruthRL), in place of 0.
    """

    key: str = "answer"
    extract: bool = True
    case: bool = False
    abstain: bool = False
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)

    def answer(self, completion: str) -> str:
        answer = final_answer(completion) if self.extract else completion
        return normalise(strip_thoughts(completion) if answer is None else answer, self.case)

    def _one(self, completion: str, accepted: Sequence[str]) -> float:
        return float(self.answer(completion) in {normalise(text, self.case) for text in accepted})


@built_in("format_tags", "think answer reasoning")
class FormatTags:
    """Share of a tag format's demands that a completion meets; 1 if it meets all.

    tags: their names, in order. Demands: each opening and each closing tag exactly once, all of them in order, and text
    inside every pair but none outside. The last two count only if all before them hold.
    graded: false scores 1 for all demands and 0 for less.
    begun: the prompt ends with the first opening tag; the tag then counts as met and may not come again. A run, and an
    evaluation, see that by themselves.
    """

    tags: Sequence[str] = ("think", "answer")
    graded: bool = True
    begun: bool = False
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        fit = isinstance(self.tags, (list, tuple)) and self.tags and all(
            isinstance(tag, str) and re.fullmatch(r"[A-Za-z][\w-]*", tag) for tag in self.tags)
        if not fit or len(set(self.tags)) < len(self.tags):
            raise UserError(f"reward 'format_tags': tags is {self.tags!r}, expected different names, such as "
                            "[think, answer]")

    def __call__(self, completions: Texts, prompts: Texts) -> list[float]:
        first = f"<{self.tags[0]}>"
        shares = [tag_share(first + text if self.begun or getattr(text, "opened", "") == first else text, self.tags)
                  for text in completions]
        return shares if self.graded else [float(share == 1) for share in shares]


def tag_share(text: str, tags: Sequence[str]) -> float:
    """The share of 2 T + 2 demands that a text meets: T opening and T closing tags once, their order, and text only
    inside every pair."""
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    once = [text.count(mark) == 1 for mark in marks]
    places = [text.find(mark) for mark in marks]
    ordered = all(once) and places == sorted(places)
    inner = r"\s*".join(rf"<{tag}>(?=\s*\S)(?!\s*</{tag}>).*?</{tag}>" for tag in tags)
    return (sum(once) + ordered + (ordered and re.fullmatch(rf"\s*{inner}\s*", text, re.S) is not None)) / (
        len(marks) + 2)


def distinct(text: str, n: int, unit: str) -> float | None:
    """The share of distinct n-grams of a text (Li et al. 2016, 1510.03055); None if it has none.
    unit: words between spaces, in lower case, or characters without spaces."""
    parts = text.casefold().split()
    parts = list("".join(parts)) if unit == "characters" else parts
    count = len(parts) - n + 1
    return len({tuple(parts[i:i + n]) for i in range(count)}) / count if count > 0 else None


@built_in("repetition", "repeat loop degenerate")
class Repetition:
    """Minus the share of a completion's n-grams that repeat earlier ones: 0 without repetition.

    unit: words, or characters, for a language without spaces.
    """

    n: int = 3
    unit: str = "words"
    reward: ClassVar[str]
    about = About(modality="text", range=(-1, 0), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        if type(self.n) is not int or self.n < 1 or self.unit not in ("words", "characters"):
            raise UserError(f"reward {self.reward!r}: n is {self.n!r} and unit {self.unit!r}, expected 1 or more, and "
                            "words or characters")

    def __call__(self, completions: Texts, prompts: Texts) -> list[float]:
        shares = [distinct(text, self.n, self.unit) for text in completions]
        return [0.0 if share is None else share - 1 for share in shares]


@built_in("distinct", "diversity variety repeat")
class Distinct(Repetition):
    """Share of distinct n-grams of a completion, distinct-n; 0 if it has none.

    unit: as in `Repetition`. A short text has a large share by nature.
    """

    n: int = 2
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)

    def __call__(self, completions: Texts, prompts: Texts) -> list[float]:
        return [distinct(text, self.n, self.unit) or 0.0 for text in completions]


UNITS = ("words", "characters", "tokens")
TOKENS = "completion_tokens"  # metadata key


class Sized:
    """Reward of completions, one by one, by their length; base class.

    unit: of the length, words between spaces, characters, or tokens, whose number the metadata must hold as
    `completion_tokens`, from 0 up.
    """

    reward: ClassVar[str]
    unit: str

    def _require(self, holds: bool, expected: str) -> None:
        if self.unit not in UNITS:
            raise UserError(f"reward {self.reward!r}: unit is {self.unit!r}, expected {', '.join(UNITS)}")
        if not holds:
            raise UserError(f"reward {self.reward!r}: expected {expected}")

    def __call__(self, completions: Texts, prompts: Texts, metadata: Metadata) -> list[float]:
        if self.unit == "words":
            return [self._of(len(text.split())) for text in completions]
        if self.unit == "characters":
            return [self._of(len(text)) for text in completions]
        for entry, prompt in zip(metadata, prompts):
            count: Any = entry.get(TOKENS)
            if type(count) not in (int, float) or not count >= 0:
                raise UserError(f"reward {self.reward!r}: metadata.{TOKENS} is {one_line(repr(count)[:80])}, expected "
                                "how many tokens the completion has; or set unit: words (prompt: "
                                f"{one_line(prompt[:80])!r})")
        return [self._of(entry[TOKENS]) for entry in metadata]

    def _of(self, size: float) -> float:
        """The score of a length."""
        return size


@built_in("text_length", "short long concise brevity")
class Length(Sized):
    """1 for a completion of wanted length, from `low` to `high`, falling linearly to 0 within a margin.

    unit: words, characters, or tokens, whose number the metadata must hold as `completion_tokens`.
    """

    low: float
    high: float
    margin: float = 0.0
    unit: str = "words"
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        self._require(0 <= self.low <= self.high and self.margin >= 0,
                      f"0 <= low <= high and a margin of 0 or more, got {self.low}, {self.high}, {self.margin}")

    def _of(self, size: float) -> float:
        beyond = max(self.low - size, size - self.high, 0)
        return 1.0 if beyond == 0 else max(0.0, 1 - beyond / self.margin) if self.margin else 0.0


@built_in("overlong", "short concise truncated")
class Overlong(Sized):
    """0 for a completion that ends in time, falling linearly to -1 over the last `buffer` before `longest` (DAPO).

    Soft overlong punishment (2503.14476, equation 13; there 20480 tokens with a buffer of 4096). unit: as in `Length`.
    """

    longest: float
    buffer: float
    unit: str = "tokens"
    about = About(modality="text", range=(-1, 0), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        self._require(0 <= self.buffer <= self.longest and self.longest > 0,
                      f"0 <= buffer <= longest, above 0, got buffer {self.buffer}, longest {self.longest}")

    def _of(self, size: float) -> float:
        if size > self.longest:
            return -1.0
        return min(0.0, (self.longest - self.buffer - size) / self.buffer) if self.buffer else 0.0


@built_in("completion_length", "short long concise brevity tokens")
class CompletionLength(Sized):
    """Length of a completion, for a transform such as `{budget: 256}`. unit: as in `Length`."""

    unit: str = "tokens"
    about = About(modality="text", range=(0, None), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        self._require(True, "")


@built_in("length_curve", "short long concise")
class LengthCurve(Sized):
    """Length reward that rises to a turning point and falls beyond it: 0 for an empty completion, -1 at `longest`.

    "Surrogate Signals from Format and Length" trains on it without answers, behind a check of the format: `gated:
    {args: {rewards: [format_tags, {use: length_curve, args: {longest: 512}}], thresholds: [1]}}`.
    turn: the turning point as a share of `longest`. unit: as in `Length`.
    """

    longest: float
    turn: float = 0.5
    unit: str = "tokens"
    about = About(modality="text", range=(-1, 1), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        self._require(self.longest > 0 and 0 < self.turn < 1,
                      f"a longest above 0 and a turn between 0 and 1, got {self.longest}, {self.turn}")

    def _of(self, size: float) -> float:
        """1 - (1 - x/p)^2 up to the turning point p, and 1 - 2 ((x - p)/(1 - p))^2 beyond it, x within [0, 1]."""
        share, turn = min(1.0, size / self.longest), self.turn
        return 1 - (1 - share / turn) ** 2 if share <= turn else 1 - 2 * ((share - turn) / (1 - turn)) ** 2


_APART = re.compile(r"(?<!\\)(?:(?<!\d)[,/]|[,/](?!\d))|[;&\n\u3001\uff0c]|\b(?:and|or)\b|[\u548c\u6216]", re.I)
_OPTION = re.compile(r"(?:(?:option|choice|\u9009\u9879?)\s?)?[ (\[{$\\*_\"'`]*([A-Z])"
                     r"(?:[)\]}]|[.:]\s|\s\()[ .:)\]}*\\]*[^\s.]", re.I)
_OF_OPTION = re.compile(r"(?:OPTION|CHOICE|\u9009\u9879?)\s*(?=\W{0,3}[A-Z]\b)")


def read_choices(text: str, letters: bool = False) -> set[str]:
    """The choices that an answer names, in upper case: parts between commas, or the letters of such as "ACD".
    letters: choices are letters; of parts that begin with one, such as (B) Paris or B. Paris, it is the choice, and
    parts that do not are of its text."""
    text = without_commands(without_reason(text))
    parts = [part.strip() for part in _APART.split(text)]
    found = {match[1].upper() for part in parts if letters and (match := _OPTION.match(part))}
    named = {normalise(_OF_OPTION.sub("", part.upper())).upper() for part in parts if re.search(r"\w", part)}
    if found:
        return found | {part for part in named if len(part) == 1}
    run = "".join(named)
    runs = len(named) == 1 and run.isalpha() and len(set(run)) == len(run) <= 6 and text.strip(OUTER).isupper()
    return set(run) if runs else named


@built_in("multi_choice", "quiz correct")
class MultiChoice(Keyed):
    """Share of choices that answer and reference have in common, among those that either has (TW-GRPO's soft reward, in
    a form of ours): 1 for the same set, 0 for none.

    key: of the metadata, a choice or a list of all right ones; None for a prompt without it.
    strict: an answer with a wrong choice scores 0, and one without them the share of the right ones that it names.
    """

    key: str = "answer"
    strict: bool = False
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)

    def _one(self, completion: str, accepted: Sequence[str]) -> float:
        right = {normalise(choice).upper() for choice in accepted}
        text = final_answer(completion) or strip_thoughts(completion)
        answer = read_choices(text, letters=all(len(choice) == 1 for choice in right))
        if self.strict and answer - right:
            return 0.0
        return len(answer & right) / len(right if self.strict else answer | right)


@built_in("translation", "bleu language")
class Translation(Keyed):
    """chrF or BLEU of a completion's answer to the references in the metadata, over 100.

    metric: "chrf" or "bleu", of sentences; BLEU is smoothed, and counts only the orders that the answer has. To mix
    them, name the reward twice; `gated` behind `format_tags` makes the format a condition.
    key: of the metadata, a text or a list of references; None for a prompt without it. The answer is the one that the
    completion states (see `answer_keys.final_answer`), or the text after its thoughts.
    """

    metric: str = "chrf"
    key: str = "answer"
    about = About(modality="text", range=(0, 1), needs="translation", licence="Apache-2.0")

    def __post_init__(self) -> None:
        if self.metric not in ("chrf", "bleu"):
            raise UserError(f"reward 'translation': metric is {self.metric!r}, expected chrf or bleu")
        import_optional("sacrebleu", "translation", "reward 'translation'")

    def _one(self, completion: str, accepted: Sequence[str]) -> float:
        import sacrebleu

        metric = sacrebleu.CHRF() if self.metric == "chrf" else sacrebleu.BLEU(effective_order=True)
        text = final_answer(completion) or strip_thoughts(completion).strip()
        return min(1.0, metric.sentence_score(text, accepted).score / 100)


@built_in("step_match")
class StepMatch(Keyed):
    """Share of a solution's steps that are right up to the first wrong one; 1 for all of them and no more.

    key: of the metadata, the right steps as one text or a list; None for a prompt without it.
    separator: between two steps.
    """

    key: str = "solution"
    separator: str = ";"
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        if not self.separator:
            raise UserError("reward 'step_match': separator is empty, expected the text between two steps")

    def read(self, value: object) -> str:
        return self.separator.join(several(value))

    def _one(self, completion: str, accepted: str) -> float:
        steps, right = ([normalise(step) for step in text.split(self.separator)] for text in (completion, accepted))
        equal = [step == other for step, other in zip(steps, right)]
        return (equal.index(False) if False in equal else len(equal)) / max(len(steps), len(right))
