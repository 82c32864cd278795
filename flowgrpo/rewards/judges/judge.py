"""Rewards by a model that is asked: a VLM or LLM behind any OpenAI-compatible endpoint.

    reward:
      judge:
        args: {url: "http://127.0.0.1:8000/v1", template: "How well does this show: {prompt}? End with Score: N of 10."}
        on_error: skip

Pointwise (`Judge`), two of a group against each other (`JudgePairs`) and by criteria (`JudgeRubric`). How answers are
read is in judge_parse.py, the endpoint in judge_client.py, ready-made forms in judge_forms.py. An answer that says
nothing, or declines, is `Failed`: no score, and counted.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, modality_of
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.judges.judge_client import Answer, Endpoint, user
from flowgrpo.rewards.judges.judge_parse import answers, compared, parser, share
from flowgrpo.rewards.pairwise import Pairing
from flowgrpo.rewards.remote.wire import one_line

ENCODINGS = {"png": {"compress_level": 1}, "webp": {"quality": 90}}
NOUNS = {"image": "Image", "video": "Video", "text": "Text"}
LICENCE = "Apache-2.0, the model's"


@dataclass(frozen=True, eq=False, kw_only=True)
class Asking(Endpoint):
    """What judges have in common: a question, and the outputs that go with it.

    template: the question, in which {prompt} stands for the prompt; or a file of it, PATH.txt. longest: pixels of a
    picture's longer side, larger ones are made smaller; encoding: png, or webp, which loses a little. frames: how many
    of a video's are shown, evenly spaced from the first to the last.
    """

    template: str = "{prompt}"
    longest: int = 1024
    encoding: str = "png"
    frames: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.encoding not in ENCODINGS or self.longest < 1 or self.frames < 1:
            raise UserError(f"a judge has encoding {self.encoding!r}, longest {self.longest}, frames {self.frames}: "
                            f"expected {' or '.join(ENCODINGS)}, and 1 or more")
        self._set(_question=_read(self.template))

    def _values(self, question: Callable[[int], list[dict[str, Any]]], read: Callable[[Answer, int], float | None],
                count: int) -> list[float | Failed]:
        """What `read(answer, i)` makes of the answers to `question(i)`, content parts, for i < count; Failed for None.
        """
        found = self.ask(lambda i: user(question(i)), count)
        values = [None if each.refused else read(each, i) for i, each in enumerate(found)]
        return [Failed(_told(each)) if value is None else value for each, value in zip(found, values)]

    def _pointwise(self, outputs: Any, prompts: Sequence[str],
                   read: Callable[[Answer], float | None]) -> list[float | Failed]:
        """A value per output, shown alone before the question."""
        def question(row: int) -> list[dict[str, Any]]:
            return [*self._parts(outputs[row]), _text(filled(self._question, prompt=prompts[row]))]

        return self._values(question, lambda answer, _: read(answer), len(prompts))

    def _parts(self, output: Any) -> list[dict[str, Any]]:
        """A picture [3, H, W], the frames of a video [F, 3, H, W] or a text, as parts of a message."""
        if isinstance(output, str):
            return [_text(output)]
        return [{"type": "image_url", "image_url": {"url": data_url(picture, self.longest, self.encoding)}}
                for picture in (output[None] if output.ndim == 3 else output[spaced(len(output), self.frames)])]


@dataclass(frozen=True, eq=False, kw_only=True)
class Judge(Asking):
    """The score that a model behind an OpenAI-compatible endpoint gives an output; Failed where it gives none.

    parse: how it is read, as of `judge_parse.parser`; scale: the lowest and highest mark, which become 0 and 1, None to
    leave them as they are. The rest is as of `Asking` and `Endpoint`.
    """

    template: str = ("Rate from 0 to 10 how well the picture, video or text shown here fulfils this request, and how "
                     "good it is: 0 useless, 10 perfect. Request: {prompt}\nEnd with a line `Score: N`.")
    parse: str = "score in [0, 10]"
    scale: Sequence[float] | None = None
    about = About(modality="image/video/text", range=(None, None), needs="server", licence=LICENCE)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(_parser=parser(self.parse, self.scale))

    def __call__(self, outputs: Any, prompts: Sequence[str], metadata: Sequence[dict] = ()) -> list[float | Failed]:
        return self._pointwise(outputs, prompts, lambda answer: None if answer.cut else self._parser(answer.text))


@dataclass(frozen=True, eq=False, kw_only=True)
class JudgePairs(Asking):
    """Which of two outputs a model prefers, as win rates within a group; a pair without an answer does not count.

    parse: "verdict", or a regular expression as of `judge_parse.compared`. both_orders, comparisons, seed: as of
    `pairwise.Pairing`; here every pair is judged in both orders unless that is switched off.
    """

    template: str = ("Two results of the same request are shown, the first and then the second. Which one fulfils it "
                     "better and is of better quality? Request: {prompt}\nEnd with `Answer: 1`, `Answer: 2` or "
                     "`Answer: tie`.")
    parse: str = "verdict"
    both_orders: bool = True
    comparisons: int | None = None
    seed: int = 0
    about = About(modality="image/video/text", range=(0, 1), needs="server", licence=LICENCE)
    pairwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(_parser=compared(self.parse), pairwise=Pairing(self.both_orders, self.comparisons, self.seed))

    def __call__(self, first: Any, second: Any, prompts: Sequence[str],
                 metadata: Sequence[dict] = ()) -> list[float | Failed]:
        """B values: 1 where the first is better, 0 where the second is, 0.5 at a tie, Failed for no answer."""
        noun = NOUNS[modality_of(first)]

        def question(row: int) -> list[dict[str, Any]]:
            sides = [[_text(f"{noun} {i}:"), *self._parts(side[row])] for i, side in enumerate((first, second), 1)]
            return [*sides[0], *sides[1], _text(filled(self._question, prompt=prompts[row]))]

        return self._values(question, lambda answer, _: None if answer.cut else self._parser(answer.text), len(prompts))


@dataclass(frozen=True, eq=False, kw_only=True)
class JudgeRubric(Asking):
    """The weighted share of criteria that a model finds fulfilled; those it does not decide are left out.

    criteria: texts, or {text: "...", weight: 2}, for every prompt; those under `key` of a prompt's metadata follow.
    None for a prompt without any. In the template, {criteria} stands for their numbered list.
    """

    template: str = ("Judge the result shown here by each of these criteria.\n{criteria}\nThe request was: {prompt}\n"
                     "Answer with JSON alone, the number of each criterion and \"yes\", \"no\" or, where it cannot be "
                     "told, \"unsure\": {\"1\": \"yes\", \"2\": \"no\"}")
    criteria: Sequence[Any] = ()
    key: str = "criteria"
    about = About(modality="image/video/text", range=(0, 1), needs="server", licence=LICENCE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{criteria}" not in self._question:
            raise UserError("a judge's template names no {criteria}, expected it where their list belongs")
        self._set(_always=weighted(self.criteria))

    def __call__(self, outputs: Any, prompts: Sequence[str], metadata: Sequence[dict]
                 ) -> list[float | None | Failed]:
        lists = [[*self._always, *weighted(entry.get(self.key, ()))] for entry in metadata]
        rows = [row for row, criteria in enumerate(lists) if criteria]

        def question(place: int) -> list[dict[str, Any]]:
            row = rows[place]
            numbered = "\n".join(f"{i}. {text}" for i, (text, _) in enumerate(lists[row], 1))
            return [*self._parts(outputs[row]),
                    _text(filled(self._question, prompt=prompts[row], criteria=numbered))]

        def read(answer: Answer, place: int) -> float | None:
            weights = [weight for _, weight in lists[rows[place]]]
            return None if answer.cut else share(answers(answer.text, len(weights)), weights)

        found = dict(zip(rows, self._values(question, read, len(rows))))
        return [found.get(row) for row in range(len(prompts))]


def weighted(criteria: Any) -> list[tuple[str, float]]:
    """Criteria with their weights, 1 where none is given. UserError for anything else than a list of these."""
    found = []
    for each in criteria if isinstance(criteria, (list, tuple)) else [criteria]:
        text, weight = (each.get("text"), each.get("weight", 1)) if isinstance(each, dict) else (each, 1)
        if not isinstance(text, str) or not text.strip() or type(weight) not in (int, float) or not 0 < weight < 1e9:
            raise UserError(f"a judge's criterion is {one_line(repr(each))}, expected a text, or "
                            "{text: ..., weight: above 0}, in a list of them")
        found.append((" ".join(text.split()), float(weight)))
    return found


def filled(template: str, **texts: str) -> str:
    """A template with each {name} replaced by its text; other braces stay, and so do those inside the texts."""
    return re.sub("|".join(rf"\{{{name}\}}" for name in texts), lambda found: texts[found[0][1:-1]], template)


def spaced(count: int, wanted: int) -> list[int]:
    """`wanted` of `count` frames, evenly spaced from the first to the last; the middle one for one, all where fewer."""
    if wanted >= count:
        return list(range(count))
    return [count // 2] if wanted == 1 else [round(i * (count - 1) / (wanted - 1)) for i in range(wanted)]


def data_url(picture: Any, longest: int, encoding: str) -> str:
    """A picture [3, H, W] in [0, 1] as a data URL of 8 bits, its longer side at most `longest` pixels. Failed for one
    that holds NaN or an infinity."""
    from PIL import Image

    from flowgrpo.rewards.pixels import eight_bit

    if not picture.isfinite().all():
        raise Failed("a judge: a picture holds NaN or an infinity")
    image, file = Image.fromarray(eight_bit(picture)), io.BytesIO()
    if max(image.size) > longest:
        size = tuple(max(1, round(side * longest / max(image.size))) for side in image.size)
        image = image.resize(size, Image.Resampling.LANCZOS)
    image.save(file, encoding.upper(), **ENCODINGS[encoding])
    return f"data:image/{encoding};base64,{base64.b64encode(file.getvalue()).decode()}"


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _read(template: str) -> str:
    """A template, or the file of one."""
    if not template.endswith(".txt"):
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"a judge's template {template} cannot be read ({type(error).__name__})") from None


def _told(answer: Answer) -> str:
    """Why an answer is none, in one line."""
    why = "declined" if answer.refused else "was cut off at max_tokens" if answer.cut else "gave no answer in the form"
    return f"a judge {why}: {one_line(answer.text[-200:])!r}"
