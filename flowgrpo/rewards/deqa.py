"""DeQA-Score (2501.11561): quality of a picture, by a vision-language model behind an endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowgrpo.rewards.about import About
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.vlm_judge.client import Answer
from flowgrpo.rewards.vlm_judge.judge import LICENCE, Asking
from flowgrpo.rewards.vlm_judge.parse import expected_level, level, refused

if TYPE_CHECKING:
    from torch import Tensor



@dataclass(frozen=True, eq=False, kw_only=True)
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
