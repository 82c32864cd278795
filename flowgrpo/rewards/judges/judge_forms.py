"""Judges with a fixed question and answer format: the wording is ours, the format that of the models' authors.

For a model trained on one wording, use `args: {template: question.txt}`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.judges.judge import LICENCE, Asking, Judge, JudgePairs, filled
from flowgrpo.rewards.judges.judge_client import Answer
from flowgrpo.rewards.judges.judge_parse import expected_level, level, parser, refused
from flowgrpo.rewards.judges.judge_pictures import sources

if TYPE_CHECKING:
    from torch import Tensor

_CAPTIONED = ("{shown} was made from the text caption below. Judge the alignment with the caption (are its objects, "
              "their attributes and relations there?) and the quality (clarity, detail, colour, appeal).")


@dataclass(frozen=True, eq=False, kw_only=True)
class UnifiedReward(Judge):
    """UnifiedReward's mark of a picture or video, 1 to 5 after "Final Score:" (2503.05236)."""

    template: str = (filled(_CAPTIONED, shown="This picture or video") + "\nName the caption's key elements with 1 "
                     "where they are there and 0 where not, and give a score from 1 to 5 after 'Final Score:'.\n"
                     "Text Caption: [{prompt}]")
    parse: str = "score in [1, 5]"
    max_tokens: int | None = 4096
    about = About(modality="image/video", range=(1, 5), needs="server", licence=LICENCE)


@dataclass(frozen=True, eq=False, kw_only=True)
class UnifiedRewardPairs(JudgePairs):
    """UnifiedReward's choice between two pictures or videos, as win rates within a group (2503.05236, 2508.20751)."""

    template: str = (filled(_CAPTIONED, shown="Each of the two") + "\nCompare them and end with a clear conclusion: "
                     "'Image 1 is better than Image 2.', 'Image 2 is better than Image 1.' or 'Both images are equally "
                     "good.'\nText Caption: [{prompt}]")
    max_tokens: int | None = 4096
    about = About(modality="image/video", range=(0, 1), needs="server", licence=LICENCE)


@dataclass(frozen=True, eq=False, kw_only=True)
class DeQA(Asking):
    """Quality of a picture as DeQA-Score: the mean of the levels bad (1) to excellent (5) under their probabilities.

    2501.11561. The probabilities are those of the token that names the level, if the endpoint gives them; else only the
    named level counts. alternatives: number of alternatives requested, 0 if the endpoint refuses to give any.
    begun: beginning of the answer, from which the endpoint goes on (vLLM and SGLang can; set "" for one that cannot).
    Template and beginning are those that DeQA-Score was trained on. For another model name the levels in the template.
    """

    template: str = "How would you rate the quality of this image?"
    max_tokens: int | None = 16
    alternatives: int = 20
    begun: str = "The quality of the image is"
    about = About(modality="image", range=(1, 5), needs="server", licence=LICENCE)

    def __post_init__(self) -> None:
        super().__post_init__()
        options: dict[str, Any] = {}
        if self.alternatives:
            options = {"logprobs": True, "top_logprobs": self.alternatives}
        if self.begun:
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        self._set(extra=options | self.extra)

    def __call__(self, images: Tensor, prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]] = ()) -> list[float | Failed]:
        return self._pointwise(images, prompts, metadata, self._level)

    def _messages(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        begun = [{"role": "assistant", "content": self.begun}] if self.begun else []
        return [*super()._messages(parts), *begun]

    def _level(self, answer: Answer) -> float | None:
        expected = None if refused(answer.text) else expected_level(answer.tokens)
        return level(answer.text) if expected is None else expected


AXES = ("instruction", "preservation", "quality")


@dataclass(frozen=True, eq=False, kw_only=True)
class EditJudge(Asking):
    """Mark of an edit by a judge that sees source and output: of instruction, preservation and quality, 0 to 1.

    Combined as in VIEScore (2312.14867): sqrt(min(instruction, preservation) * quality). None for a prompt without a
    source. axis: "overall", or one of the three alone.
    """

    template: str = ("A source and an output are shown; the output was made from the source by this instruction: "
                     "{prompt}\nRate three things from 0 to 10 each. instruction: is everything that it asks for done, "
                     "and done right? preservation: is all else as it was, persons, objects, background and layout? "
                     "quality: is the output natural, without artefacts, seams or distortions, whatever was asked for? "
                     "An output that equals the source gets 0 for instruction.\nAnswer with JSON alone: "
                     "{\"instruction\": N, \"preservation\": N, \"quality\": N}")
    show: Sequence[str] = ("source", "output")
    axis: str = "overall"
    about = About(modality="image/video", range=(0, 1), needs="server", licence=LICENCE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axis not in ("overall", *AXES):
            raise UserError(f"reward 'edit_judge': axis is {self.axis!r}, expected overall, {', '.join(AXES)}")

    def __call__(self, outputs: Tensor | Sequence[str], prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
                 ) -> list[float | None | Failed]:
        rows = [row for row, entry in enumerate(metadata) if sources(entry)[1]]
        shown: Any = [outputs[row] for row in rows]
        given = [prompts[row] for row in rows], [metadata[row] for row in rows]
        scores = self._pointwise(shown, *given, self._combined)
        values = dict(zip(rows, scores))
        return [values.get(row) for row in range(len(prompts))]

    def _combined(self, answer: Answer) -> float | None:
        marks = {axis: parser(f"json {axis} in [0, 10]", (0, 10))(answer.text) for axis in AXES}
        if self.axis != "overall":
            return marks[self.axis]
        instruction, preservation, quality = marks.values()
        if instruction is None or preservation is None or quality is None:
            return None
        return math.sqrt(min(instruction, preservation) * quality)
