"""Judge rewards: a VLM or LLM behind any OpenAI-compatible endpoint scores the outputs.

    reward:
      judge:
        args: {url: "http://127.0.0.1:8000/v1", template: "How well does this show: {prompt}? End with Score: N of 10."}
        on_error: skip

Pointwise (`Judge`), two of a group against each other (`JudgePairs`) and by criteria (`JudgeRubric`). Answers are
parsed in judge_parse.py, the endpoint is in judge_client.py, ready-made forms in judge_forms.py. An empty answer, or a
refusal, is `Failed`: no score, and counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.judges.judge_client import Answer, Endpoint, user
from flowgrpo.rewards.judges.judge_parse import (
    Criterion,
    answers,
    compared,
    conclusion,
    objects,
    parser,
    refused,
    share,
)
from flowgrpo.rewards.judges.judge_pictures import ENCODINGS, data_url, picture_part, source_parts, spaced, text_part
from flowgrpo.rewards.judges.judge_writer import CachedWriter
from flowgrpo.rewards.pairing import Pairing
from flowgrpo.rewards.remote.wire import one_line
from flowgrpo.rewards.reward import modality_of

if TYPE_CHECKING:
    from torch import Tensor

SHOWN = ("output", "source")
NOUNS = {"image": "Image", "video": "Video", "text": "Text"}
CRITERIA = ("Write at most 8 criteria that tell a good answer to the request below from a bad one, specific to it: "
            "each a short statement that an answer meets or not. Give each a weight from 1 to 5, and what a good "
            "answer must not have a negative one.\nRequest: {prompt}\nAnswer with JSON alone: [{\"text\": \"names the "
            "dose\", \"weight\": 3}, {\"text\": \"invents a source\", \"weight\": -2}]")
LICENCE = "Apache-2.0, the model's"


@dataclass(frozen=True, eq=False, kw_only=True)
class Asking(Endpoint):
    """Base of all judges: a question, and the outputs sent with it.

    template: the question, with {prompt} for the prompt; or its file, PATH.txt.
    longest: pixels of a picture's longer side; larger ones are shrunk.
    encoding: png, or webp, which is slightly lossy.
    frames: shown frames of a video, evenly spaced from the first to the last.
    show: `output`, and `source` for the pictures or the video that the prompt brings, where it does; they come first.
    """

    template: str = "{prompt}"
    longest: int = 1024
    encoding: str = "png"
    frames: int = 8
    show: Sequence[str] = ("output",)
    _question: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.encoding not in ENCODINGS or self.longest < 1 or self.frames < 1:
            raise UserError(f"a judge has encoding {self.encoding!r}, longest {self.longest}, frames {self.frames}: "
                            f"expected {' or '.join(ENCODINGS)}, and 1 or more")
        if not {"output"} <= set(self.show) <= set(SHOWN):
            raise UserError(f"a judge has show {list(self.show)!r}: expected [output] or [output, source]")
        self._set(_question=_read(self.template))

    def _values(self, question: Callable[[int], list[dict[str, Any]]], read: Callable[[Answer, int], float | None],
                count: int) -> list[float | Failed]:
        """Return `read(answer, i)` of the answers to `question(i)`, content parts, for i < count; Failed for None."""
        replies = self.ask(lambda i: self._messages(question(i)), count)
        values = [None if reply.refused else read(reply, i) for i, reply in enumerate(replies)]
        return [Failed(_told(reply)) if value is None else value for reply, value in zip(replies, values)]

    def _messages(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages of one question, made of content parts."""
        return user(parts)

    def _pointwise(self, outputs: Tensor | Sequence[Tensor] | Sequence[str], prompts: Sequence[str],
                   metadata: Sequence[dict[str, Any]], read: Callable[[Answer], float | None]) -> list[float | Failed]:
        """Return a value per output, shown before the question, after its source where that is shown."""
        def question(row: int) -> list[dict[str, Any]]:
            return [*self._shown(outputs, metadata, row), text_part(filled(self._question, prompt=prompts[row]))]

        return self._values(question, lambda answer, _: read(answer), len(prompts))

    def _source(self, metadata: Sequence[dict[str, Any]], row: int) -> list[dict[str, Any]]:
        """Return the source of a row as parts of a message; none where it has none, or where it is not shown."""
        if "source" not in self.show or not metadata:
            return []
        return source_parts(metadata[row], self.frames, self.longest, self.encoding)

    def _shown(self, outputs: Tensor | Sequence[Tensor] | Sequence[str], metadata: Sequence[dict[str, Any]], row: int
               ) -> list[dict[str, Any]]:
        """Return an output as parts of a message, after its source where that is shown."""
        source = self._source(metadata, row)
        return [*source, *[text_part("Output:")] * bool(source), *self._parts(outputs[row])]

    def _parts(self, output: Tensor | str) -> list[dict[str, Any]]:
        """Return a picture [3, H, W], the frames of a video [F, 3, H, W] or a text, as parts of a message."""
        if isinstance(output, str):
            return [text_part(output)]
        return [picture_part(data_url(picture, self.longest, self.encoding))
                for picture in (output[None] if output.ndim == 3 else output[spaced(len(output), self.frames)])]


@dataclass(frozen=True, eq=False, kw_only=True)
class Judge(Asking):
    """Score that a model behind an OpenAI-compatible endpoint gives an output; Failed if it gives none.

    parse: reader of the score, see `judge_parse.parser`. scale: lowest and highest mark, mapped to 0 and 1; None for
    raw marks. Other fields: see `Asking` and `Endpoint`.
    """

    template: str = ("Rate from 0 to 10 how well the picture, video or text shown here fulfils this request, and how "
                     "good it is: 0 useless, 10 perfect. Request: {prompt}\nEnd with a line `Score: N`.")
    parse: str = "score in [0, 10]"
    scale: Sequence[float] | None = None
    _parser: Callable[[str], float | None] = field(init=False, repr=False)
    about = About(modality="image/video/text", range=(None, None), needs="server", licence=LICENCE)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(_parser=parser(self.parse, self.scale))

    def __call__(self, outputs: Tensor | Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]] = ()) -> list[float | Failed]:
        return self._pointwise(outputs, prompts, metadata,
                               lambda answer: None if answer.cut else self._parser(answer.text))


@dataclass(frozen=True, eq=False, kw_only=True)
class JudgePairs(Asking):
    """Preference of a model between two outputs, as win rates within a group; a pair without an answer does not count.

    parse: "verdict", or a regular expression as in `judge_parse.compared`. both_orders, comparisons, seed: as in
    `pairwise.Pairing`; here every pair is judged in both orders by default.
    """

    template: str = ("Two results of the same request are shown, the first and then the second. Which one fulfils it "
                     "better and is of better quality? Request: {prompt}\nEnd with `Answer: 1`, `Answer: 2` or "
                     "`Answer: tie`.")
    parse: str = "verdict"
    both_orders: bool = True
    comparisons: int | None = None
    seed: int = 0
    _parser: Callable[[str], float | None] = field(init=False, repr=False)
    about = About(modality="image/video/text", range=(0, 1), needs="server", licence=LICENCE)
    pairwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(_parser=compared(self.parse), pairwise=Pairing(self.both_orders, self.comparisons, self.seed))

    def __call__(self, first: Tensor | Sequence[str], second: Tensor | Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]] = ()) -> list[float | Failed]:
        """Return B values: 1 where the first is better, 0 where the second is, 0.5 at a tie, Failed for no answer."""
        noun = NOUNS[modality_of(first)]

        def question(row: int) -> list[dict[str, Any]]:
            sides = [[text_part(f"{noun} {i}:"), *self._parts(side[row])] for i, side in enumerate((first, second), 1)]
            return [*self._source(metadata, row), *sides[0], *sides[1],
                    text_part(filled(self._question, prompt=prompts[row]))]

        return self._values(question, lambda answer, _: None if answer.cut else self._parser(answer.text), len(prompts))


@dataclass(frozen=True, eq=False, kw_only=True)
class JudgeRubric(Asking):
    """Weighted share of criteria that a model finds fulfilled; undecided ones are left out.

    criteria: texts, or {text: "...", weight: 2}, for every prompt, followed by those under `key` of a prompt's
    metadata. A negative weight lowers the score of an output that meets the criterion, a flaw. `needed: true` makes one
    a veto: an output that misses it, or that has the flaw, scores 0. None for a prompt without a positive one. In the
    template, {criteria} stands for their numbered list.
    writer: arguments of a language model's endpoint that writes the criteria of prompts whose metadata have none, once
    per prompt; kept in `file` (the rubric generator of Baichuan-M2).
    """

    template: str = ("Judge the result shown here by each of these criteria.\n{criteria}\nThe request was: {prompt}\n"
                     "Answer with JSON alone, the number of each criterion and \"yes\", \"no\" or, where it cannot be "
                     "told, \"unsure\": {\"1\": \"yes\", \"2\": \"no\"}")
    criteria: Sequence[Any] = ()
    key: str = "criteria"
    writer: dict[str, Any] | None = None
    file: str | None = None
    _always: list[Criterion] = field(init=False, repr=False)
    _writer: CriteriaWriter | None = field(init=False, repr=False)
    about = About(modality="image/video/text", range=(0, 1), needs="server", licence=LICENCE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{criteria}" not in self._question:
            raise UserError("a judge's template names no {criteria}, expected it where their list belongs")
        if self.file is not None and self.writer is None:
            raise UserError("a judge's file keeps the criteria of a writer: give writer, or leave it out")
        self._set(_always=weighted(self.criteria),
                  _writer=None if self.writer is None else CriteriaWriter(self.writer, self.file, CRITERIA))

    def __call__(self, outputs: Tensor | Sequence[str], prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
                 ) -> list[float | None | Failed]:
        left = [prompt for prompt, entry in zip(prompts, metadata) if self._writer and self.key not in entry]
        written = self._writer(left) if self._writer and left else {}
        lists = [[*self._always, *(weighted(entry[self.key]) if self.key in entry else written.get(prompt, ()))]
                 for prompt, entry in zip(prompts, metadata)]
        rows = [row for row, criteria in enumerate(lists) if any(each.weight > 0 for each in criteria)]

        def question(place: int) -> list[dict[str, Any]]:
            row = rows[place]
            numbered = "\n".join(f"{i}. {each.text}" for i, each in enumerate(lists[row], 1))
            return [*self._shown(outputs, metadata, row),
                    text_part(filled(self._question, prompt=prompts[row], criteria=numbered))]

        def read(answer: Answer, place: int) -> float | None:
            criteria = lists[rows[place]]
            return None if answer.cut else share(answers(answer.text, len(criteria)), criteria)

        values = dict(zip(rows, self._values(question, read, len(rows))))
        return [values.get(row) for row in range(len(prompts))]


def weighted(criteria: object) -> list[Criterion]:
    """Return criteria with their weights, 1 if not given.
    Raises UserError for anything else than a list of these."""
    result = []
    for criterion in criteria if isinstance(criteria, (list, tuple)) else [criteria]:
        entry: dict[str, Any] = criterion if isinstance(criterion, dict) else {"text": criterion}
        text, weight, needed = entry.get("text"), entry.get("weight", 1), entry.get("needed", False)
        if (not isinstance(text, str) or not text.strip() or type(weight) not in (int, float)
                or not 0 < abs(weight) < 1e9 or type(needed) is not bool or entry.keys() - {*Criterion._fields}):
            raise UserError(f"a judge's criterion is {one_line(repr(criterion))}, expected a text, or "
                            "{text: ..., weight: other than 0, needed: false}, in a list of them")
        result.append(Criterion(" ".join(text.split()), float(weight), needed))
    return result


class CriteriaWriter(CachedWriter[Criterion]):
    """Language model that writes criteria for prompts, once per prompt."""

    noun = "criteria"

    def read(self, entries: object) -> list[Criterion]:
        return weighted(entries)

    def written_in(self, answer: Answer) -> list[Criterion]:
        """Return the valid criteria in a model's answer, whatever surrounds them; none if it declined or was cut off.
        """
        written: list[Criterion] = []
        for entry in () if answer.refused or answer.cut or refused(answer.text) else objects(conclusion(answer.text)):
            try:
                written += weighted([entry])
            except UserError:  # another object
                continue
        return written

    def plain(self, entry: Criterion) -> Any:
        return entry._asdict()


def filled(template: str, **texts: str) -> str:
    """Return a template with each {name} replaced by its text; other braces stay, and so do those inside the texts."""
    return re.sub("|".join(rf"\{{{name}\}}" for name in texts), lambda match: texts[match[0][1:-1]], template)


def _read(template: str) -> str:
    """Return a template, or the content of its file."""
    if not template.endswith(".txt"):
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"a judge's template {template} cannot be read ({type(error).__name__})") from None


def _told(answer: Answer) -> str:
    """Return in one line why an answer counts as none."""
    why = "declined" if answer.refused else "was cut off at max_tokens" if answer.cut else "gave no answer in the form"
    return f"a judge {why}: {one_line(answer.text[-200:])!r}"
