"""Judge of an edit, which sees its source: the wording is ours, the combination of marks VIEScore's (2312.14867)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.vlm_judge.client import Answer
from flowgrpo.rewards.vlm_judge.judge import LICENCE, Asking
from flowgrpo.rewards.vlm_judge.parse import parser
from flowgrpo.rewards.vlm_judge.pictures import sources

if TYPE_CHECKING:
    from torch import Tensor

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
