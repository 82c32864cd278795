"""Judge rewards: a VLM or LLM behind any OpenAI-compatible endpoint scores the outputs. Its messages show them, and the
source that an edit started from.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from PIL import Image

from flowgrpo.data.images import Clip, frame_count, read_image
from flowgrpo.data.open_image import require_open
from flowgrpo.errors import UserError
from flowgrpo.escaped import base64_of, one_line
from flowgrpo.rewards.about import About, Pairing, built_in
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.released_text import texts
from flowgrpo.rewards.reward import modality_of
from flowgrpo.rewards.vlm_judge.client import Answer, Endpoint, user
from flowgrpo.rewards.vlm_judge.parse import parser, verdict_parser

if TYPE_CHECKING:
    from torch import Tensor

ENCODINGS = {"png": {"compress_level": 1}, "webp": {"quality": 90}}
KEPT = 64  # encoded source images in memory
SHOWN = ("output", "source")
NOUNS = {"image": "Image", "video": "Video", "text": "Text"}
LICENCE = "Apache-2.0, the model's"


def frame_index(count: int, number: int) -> list[int]:
    """`number` of `count` frames, evenly spaced from first to last; the middle one for one, all if fewer."""
    if number >= count:
        return list(range(count))
    return [count // 2] if number == 1 else [round(i * (count - 1) / (number - 1)) for i in range(number)]


def data_url(picture: Tensor, longest: int, encoding: str) -> str:
    """Image [3, H, W] in [0, 1] as an 8-bit data URL, `longest` pixels at most. Raises Failed for one with NaN."""
    from flowgrpo.rewards.preprocessing import eight_bit

    if not picture.isfinite().all():
        raise Failed("a judge: an image holds NaN or an infinity")
    image = Image.fromarray(eight_bit(picture))
    if max(image.size) > longest:
        width, height = (max(1, round(side * longest / max(image.size))) for side in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    return f"data:image/{encoding};base64,{base64_of(image, encoding.upper(), **ENCODINGS[encoding])}"


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def sources(entry: dict[str, Any]) -> tuple[str, list[str]]:
    """(the metadata key, the paths) of what a prompt's output is made from; ("", []) for none."""
    for key in ("images", "image", "video"):
        if key in entry:
            return key, [str(path) for path in entry[key]] if isinstance(entry[key], list) else [str(entry[key])]
    return "", []


@functools.lru_cache(maxsize=KEPT)
def _urls(path: str, modified: int, video: bool, frames: int, longest: int, encoding: str) -> tuple[str, ...]:
    """A source's images as data URLs. modified: of the file, which a changed one differs in."""
    from flowgrpo.rewards.preprocessing import tensor_of

    shown = Clip.open(path, frame_count(path)).frames if video else [read_image(path)]
    images = [shown[at] for at in frame_index(len(shown), frames)]
    return tuple(data_url(tensor_of(picture), longest, encoding) for picture in images)


@dataclass(frozen=True, eq=False, kw_only=True)
class Asking(Endpoint):
    """Base of all judges: a question, and the outputs sent with it.

    template: the question, with {prompt} for the prompt; or its file, PATH.txt.
    longest: pixels of an image's longer side; larger ones are shrunk.
    encoding: png, or webp, which is slightly lossy.
    frames: shown frames of a video, evenly spaced from the first to the last.
    show: `output`, and `source` for the images or the video that the prompt brings, where it does; they come first.
    """

    template: str = "{prompt}"
    longest: int = 1024
    encoding: str = "png"
    frames: int = 8
    show: Sequence[str] = ("output",)
    released = ""  # name of the texts (`released_text`) that a class asks in place of a template
    _question: str = field(init=False, repr=False)
    _questions: dict[str, str] = field(init=False, repr=False)  # by modality, in its place

    @property
    def sends(self) -> tuple[str, ...]:  # type: ignore[override]
        return "prompts", "samples", *(["source images"] if "source" in self.show else [])

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.encoding not in ENCODINGS or self.longest < 1 or self.frames < 1:
            raise UserError(f"a judge has encoding {self.encoding!r}, longest {self.longest}, frames {self.frames}: "
                            f"expected {' or '.join(ENCODINGS)}, and 1 or more")
        if not {"output"} <= set(self.show) <= set(SHOWN):
            raise UserError(f"a judge has show {list(self.show)!r}: expected [output] or [output, source]")
        question = self.template
        if question.endswith(".txt"):
            try:
                question = Path(question).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"a judge's template {question} cannot be read ({type(error).__name__})") from None
        vars(self).update(_question=question, _questions=texts(self.released, "template")
                          if self.released and not self.template else {})

    def _values(self, question: Callable[[int], list[dict[str, Any]]], read: Callable[[Answer, int], float | None],
                count: int) -> list[float | Failed]:
        """`read(answer, i)` of the answers to `question(i)`, content parts, for i < count; Failed for None."""
        values: list[float | Failed] = []
        for i, reply in enumerate(self.ask(lambda i: self._messages(question(i)), count)):
            value = None if reply.refused else read(reply, i)
            why = "declined" if reply.refused else "was cut off at max_tokens" if reply.cut else \
                "gave no answer in the form"
            values.append(Failed(f"a judge {why}: {one_line(reply.text[-200:])!r}") if value is None else value)
        return values

    def _messages(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return user(parts)

    def _pointwise(self, outputs: Tensor | Sequence[Tensor] | Sequence[str], prompts: Sequence[str],
                   metadata: Sequence[dict[str, Any]], read: Callable[[Answer], float | None]) -> list[float | Failed]:
        """A value per output, shown before the question, after its source where that is shown."""
        asked = self._questions.get(modality_of(outputs), self._question)

        def question(row: int) -> list[dict[str, Any]]:
            return [*self._message_parts(outputs, metadata, row), text_part(fill_template(asked, prompt=prompts[row]))]

        return self._values(question, lambda answer, _: read(answer), len(prompts))

    def _source(self, metadata: Sequence[dict[str, Any]], row: int) -> list[dict[str, Any]]:
        """Labelled source images of a prompt, or frames of its source video, as parts of a message; none without a
        source in its metadata. Raises UserError for an unreadable file."""
        key, paths = sources(metadata[row]) if "source" in self.show and metadata else ("", [])
        if paths:
            require_open()
        parts: list[dict[str, Any]] = []
        for number, path in enumerate(paths, 1):
            try:
                urls = _urls(path, Path(path).stat().st_mtime_ns, key == "video", self.frames, self.longest,
                             self.encoding)
            except (OSError, UserError) as error:
                raise UserError(f"a judge: the source under metadata.{key} cannot be shown ({error})") from None
            parts += [text_part(f"Source {number}:" if len(paths) > 1 else "Source:"), *map(image_part, urls)]
        return parts

    def _message_parts(self, outputs: Tensor | Sequence[Tensor] | Sequence[str], metadata: Sequence[dict[str, Any]],
                       row: int) -> list[dict[str, Any]]:
        source = self._source(metadata, row)
        return [*source, *[text_part("Output:")] * bool(source), *self._parts(outputs[row])]

    def _parts(self, output: Tensor | str) -> list[dict[str, Any]]:
        if isinstance(output, str):
            return [text_part(output)]
        return [image_part(data_url(picture, self.longest, self.encoding))
                for picture in (output[None] if output.ndim == 3 else output[frame_index(len(output), self.frames)])]


@built_in("judge", "hands face anatomy fingers style aesthetic vlm gpt llm your own question api",
          eq=False, kw_only=True)
class Judge(Asking):
    """Score that a model behind an OpenAI-compatible endpoint gives an output; Failed if it gives none.

    parse: reader of the score, see `parse.parser`. scale: lowest and highest mark, mapped to 0 and 1; None for
    raw marks. Other fields: see `Asking` and `Endpoint`.
    """

    template: str = ("Rate from 0 to 10 how well the picture, video or text shown here fulfils this request, and how "
                     "good it is: 0 useless, 10 perfect. Request: {prompt}\nEnd with a line `Score: N`.")
    parse: str = "score in [0, 10]"
    scale: Sequence[float] | None = None
    _parsers: dict[str, Callable[[str], float | None]] = field(init=False, repr=False)
    marks: ClassVar[dict[str, str]] = {}  # by modality, in place of an empty `parse`
    about = About(modality="image/video/text", range=(None, None), needs="server", licence=LICENCE)

    def __post_init__(self) -> None:
        super().__post_init__()
        vars(self)["_parsers"] = {kind: parser(self.parse or self.marks.get(kind, ""), self.scale)
                                  for kind in self.marks or NOUNS}

    def __call__(self, outputs: Tensor | Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]] = ()) -> list[float | Failed]:
        read = self._parsers[modality_of(outputs)]
        return self._pointwise(outputs, prompts, metadata, lambda answer: None if answer.cut else read(answer.text))


@built_in("judge_pairs", "hands face anatomy style vlm gpt llm comparison preference", eq=False, kw_only=True)
class JudgePairs(Asking):
    """Preference of a model between two outputs, as win rates within a group; a pair without an answer does not count.

    parse: "verdict", or a regular expression as in `parse.verdict_parser`. both_orders, comparisons, seed: as in
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
        vars(self).update(_parser=verdict_parser(self.parse),
                          pairwise=Pairing(self.both_orders, self.comparisons, self.seed))

    def __call__(self, first: Tensor | Sequence[str], second: Tensor | Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]] = ()) -> list[float | Failed]:
        """B values: 1 where the first is better, 0 where the second is, 0.5 at a tie, Failed for no answer."""
        modality = modality_of(first)
        asked = self._questions.get(modality, self._question)

        def question(row: int) -> list[dict[str, Any]]:
            sides = [[*self._label(modality, i), *self._parts(side[row])] for i, side in enumerate((first, second), 1)]
            text = text_part(fill_template(asked, prompt=prompts[row]))
            return [*self._source(metadata, row), *sides[0], *sides[1], text]

        return self._values(question, lambda answer, _: None if answer.cut else self._parser(answer.text), len(prompts))

    def _label(self, modality: str, number: int) -> list[dict[str, Any]]:
        return [text_part(f"{NOUNS[modality]} {number}:")]


def fill_template(template: str, **texts: str) -> str:
    """Template with each {name} replaced by its text; other braces stay, and so do those inside the texts."""
    return re.sub("|".join(rf"\{{{name}\}}" for name in texts), lambda match: texts[match[0][1:-1]], template)
