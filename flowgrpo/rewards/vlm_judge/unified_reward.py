"""UnifiedReward (2503.05236): a vision-language model that marks and compares images and videos, behind an endpoint.

Both rewards ask the questions of the release's inference_qwen, word for word; `flowgrpo reward fetch NAME` copies them
(MIT, CodeGoat24/UnifiedReward). Without them, or for a model that was trained on other questions, such as
UnifiedReward-Think or UnifiedReward 2.0, give `args: {template: FILE.txt}`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowgrpo.rewards.about import About
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.released_text import texts
from flowgrpo.rewards.reward import modality_of
from flowgrpo.rewards.vlm_judge.judge import LICENCE, Asking, JudgePairs
from flowgrpo.rewards.vlm_judge.parse import parser

if TYPE_CHECKING:
    from torch import Tensor

MARKS = {"image": "score in [1, 5]", "video": "score in [1, 10]"}


@dataclass(frozen=True, eq=False, kw_only=True)
class UnifiedReward(Asking):
    """UnifiedReward's mark after "Final Score:": 1 to 5 of an image, 1 to 10 of a video (2503.05236).

    A video is sent as its frames; the release sends the video. Flow-GRPO's reward is another one: it asks its own
    question (rewards.py, unifiedreward_score_sglang) about images of 512 pixels, divides the mark by 5 and counts 0 for
    an answer without one, which is None here: `template: FILE.txt` and `scale: [0, 5]`.
    template: another question, or its file, PATH.txt, for images and videos.
    parse, scale: as in `Judge`; an empty `parse` reads the release's marks.
    """

    template: str = ""
    parse: str = ""
    scale: Sequence[float] | None = None
    max_tokens: int | None = 4096
    _questions: dict[str, str] = field(init=False, repr=False)
    _parsers: dict[str, Callable[[str], float | None]] = field(init=False, repr=False)
    about = About(modality="image/video", range=(1, 10), needs="server", licence=LICENCE)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(_parsers={kind: parser(self.parse or marks, self.scale) for kind, marks in MARKS.items()},
                  _questions={} if self.template else texts("unified_reward", "template"))

    def __call__(self, outputs: Tensor, prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]] = ()) -> list[float | Failed]:
        read = self._parsers[modality_of(outputs)]
        return self._pointwise(outputs, prompts, metadata,
                               lambda answer: None if answer.cut else read(answer.text))

    def _asked(self, modality: str) -> str:
        return self._questions.get(modality, self._question)


@dataclass(frozen=True, eq=False, kw_only=True)
class UnifiedRewardPairs(JudgePairs):
    """UnifiedReward's choice between two images or videos, as win rates within a group (2503.05236).

    Two images stand before the question, as in the release. Two videos are sent as their frames, each after a label.
    template: another question, or its file, PATH.txt, for images and videos. Other fields: see `JudgePairs`.
    """

    template: str = ""
    max_tokens: int | None = 4096
    _questions: dict[str, str] = field(init=False, repr=False)
    about = About(modality="image/video", range=(0, 1), needs="server", licence=LICENCE)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(_questions={} if self.template else texts("unified_reward_pairs", "template"))

    def _asked(self, modality: str) -> str:
        return self._questions.get(modality, self._question)

    def _label(self, modality: str, number: int) -> list[dict[str, Any]]:
        return [] if modality == "image" and self._questions else super()._label(modality, number)
