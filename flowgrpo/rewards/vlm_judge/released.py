"""Released judges behind an endpoint: UnifiedReward (2503.05236), which marks and compares images and videos, and
DeQA-Score (2501.11561), the quality of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.vlm_judge.client import Answer
from flowgrpo.rewards.vlm_judge.judge import LICENCE, Asking, Judge, JudgePairs
from flowgrpo.rewards.vlm_judge.parse import declines, expected_level, level

if TYPE_CHECKING:
    from torch import Tensor


@built_in("unified_reward", "human preference quality aesthetic judge", eq=False, kw_only=True)
class UnifiedReward(Judge):
    """UnifiedReward's mark after "Final Score:": 1 to 5 of an image, 1 to 10 of a video (2503.05236).

    A video is sent as its frames; the release sends the video. Flow-GRPO's reward is another one: it asks its own
    question (rewards.py, unifiedreward_score_sglang) about images of 512 pixels, divides the mark by 5 and counts 0 for
    an answer without one, which is None here: `template: FILE.txt` and `scale: [0, 5]`.
    template: another question, or its file, PATH.txt, for images and videos.
    parse, scale: as in `Judge`; an empty `parse` reads the release's marks.
    """

    template: str = ""
    parse: str = ""
    max_tokens: int | None = 4096
    released, marks = "unified_reward", {"image": "score in [1, 5]", "video": "score in [1, 10]"}
    about = About(modality="image/video", range=(1, 10), needs="server", licence=LICENCE)


@built_in("unified_reward_pairs", "human preference quality aesthetic judge", eq=False, kw_only=True)
class UnifiedRewardPairs(JudgePairs):
    """UnifiedReward's choice between two images or videos, as win rates within a group (2503.05236).

    Two images stand before the question, as in the release. Two videos are sent as their frames, each after a label.
    template: another question, or its file, PATH.txt, for images and videos. Other fields: see `JudgePairs`.
    """

    template: str = ""
    max_tokens: int | None = 4096
    released = "unified_reward_pairs"
    about = About(modality="image/video", range=(0, 1), needs="server", licence=LICENCE)

    def _label(self, modality: str, number: int) -> list[dict[str, Any]]:
        return [] if modality == "image" and self._questions else super()._label(modality, number)


@built_in("deqa", "noise blur artefact artifact sharp technical iqa", eq=False, kw_only=True)
class DeQA(Asking):
    """Quality of an image as DeQA-Score: the mean of the levels bad (1) to excellent (5) under their probabilities.

    2501.11561. The probabilities are those of the token that names the level, if the endpoint gives them; else only the
    named level counts. alternatives: number of alternatives requested, 0 if the endpoint refuses to give any.
    begun: beginning of the answer, from which vLLM and SGLang go on; other servers do not get it.
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
        vars(self)["extra"] = options | self.extra

    def __call__(self, images: Tensor, prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]] = ()) -> list[float | Failed]:
        def read(answer: Answer) -> float | None:
            expected = None if declines(answer.text) else expected_level(answer.tokens)
            return level(answer.text) if expected is None else expected

        return self._pointwise(images, prompts, metadata, read)

    def _messages(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        begun = [{"role": "assistant", "content": self.begun}] if self.begun else []
        return [*super()._messages(parts), *begun]
