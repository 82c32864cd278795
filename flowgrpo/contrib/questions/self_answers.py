"""Reward by the trained model's own answers: the denoiser that drew a picture answers its prompt's questions.

    parts: {data: {type: SelfAnswers}}    # learns the answers in the same run
    reward: {self_answers: 1.0}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowgrpo.contrib.questions.questions import of_prompt
from flowgrpo.errors import UserError
from flowgrpo.policies.pipelines.picture_reader import NAME, likeliest
from flowgrpo.rewards.about import About
from flowgrpo.rewards.failures import Failed

SCORES = ("share", "probability")


@dataclass(frozen=True, eq=False, kw_only=True)
class SelfAnswers:
    """Share of the prompt's questions that the trained denoiser itself answers as the prompt says (UniRL, 2505.23380).

    It reads the clean latents that it drew.
    score: "share", of questions whose right answer is likelier than all others, or "probability", the mean of the right
    answers'.
    key: metadata key of a prompt's own questions, as in `question_answers`.
    batch_size: latents that the denoiser reads at once.

    Raises UserError outside of a run that learns answers by parts.data SelfAnswers.
    """

    score: str = "share"
    key: str = "questions"
    batch_size: int = 32
    about = About(modality="image", range=(0, 1), needs="", licence="Apache-2.0")

    def __post_init__(self) -> None:
        if self.score not in SCORES or self.batch_size < 1:
            raise UserError(f"reward 'self_answers': score is {self.score!r} and batch_size {self.batch_size}, "
                            f"expected {' or '.join(SCORES)}, and 1 or more")

    @torch.no_grad()
    def __call__(self, latents: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
                 policy: Any = None) -> list[float | Failed]:
        head = policy and policy.weights and policy.weights.added.get(NAME)
        if head is None:
            raise UserError("reward 'self_answers' asks the model that is trained, which has learned no answers here: "
                            "set parts.data: {type: SelfAnswers} in a training run")
        values: list[float | Failed] = []
        for at in range(0, len(prompts), self.batch_size):
            some = slice(at, at + self.batch_size)
            values += self._scored(head, latents[some], prompts[some], metadata[some])
        return values

    def _scored(self, head: Any, latents: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
                ) -> list[float | Failed]:
        listed = [of_prompt(prompt, entry, self.key) or [] for prompt, entry in zip(prompts, metadata)]
        pairs = [(row, question) for row, questions in enumerate(listed) for question in questions]
        if not pairs:
            return [Failed(f"self_answers: no question can be made of the prompt {prompt!r}") for prompt in prompts]
        logp = head(latents, [(row, question.question, question.choices) for row, question in pairs]).cpu()
        right = head.numbers([question.answer for _, question in pairs])
        likely = logp.gather(1, right[:, None])[:, 0].exp()
        of: list[list[float]] = [[] for _ in prompts]
        marks = likeliest(logp, right).float() if self.score == "share" else likely
        for (row, _), mark in zip(pairs, marks.tolist()):
            of[row].append(mark)
        return [sum(values) / len(values) if values else
                Failed(f"self_answers: no question can be made of the prompt {prompt!r}")
                for values, prompt in zip(of, prompts)]
