"""Reward by the trained model's own answers: the weights that drew an image answer its prompt's questions.

    text: {generates: image}
    reward: {scene: 1.0, self_answers: 0.5}
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo.contrib.questions import answer_losses
from flowgrpo.contrib.questions.answer_losses import Asked
from flowgrpo.contrib.questions.questions import of_prompt
from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.failures import Failed


@built_in("self_answers", eq=False, kw_only=True)
class SelfAnswers:
    """Share of the prompt's questions that the trained model itself answers as the prompt says (UniRL, 2505.23380).

    The likeliest answer counts. Alone it is no measure: it can rise while the images get worse.
    key: metadata key of a prompt's own questions, as in `question_answers`.
    condition: the question as the model reads it, with {prompt} for it; as in parts.data SelfAnswers.
    length: most tokens of an answer.
    strict: share of the reward for images of which every answer is right; the rest is for the share of right ones.

    Raises UserError for a model that only draws, or outside of a run.
    """

    key: str = "questions"
    condition: str = "{prompt}"
    length: int = 8
    strict: float = 0.0
    about = About(modality="image", range=(0, 1), needs="", licence="Apache-2.0")

    def __post_init__(self) -> None:
        if "{prompt}" not in self.condition or self.length < 1:
            raise UserError(f"reward 'self_answers': condition is {self.condition!r} and length {self.length}, "
                            "expected a text with {prompt}, and 1 or more")
        if not 0 <= self.strict <= 1:
            raise UserError(f"reward 'self_answers': strict is {self.strict}, expected 0 to 1")

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
                 policy: Any = None) -> list[float | Failed]:
        reader = answer_losses.reader_of(policy, self.length)
        asked = [Asked(row, self.condition.replace("{prompt}", question.question), question.answer)
                 for row, (prompt, entry) in enumerate(zip(prompts, metadata))
                 for question in of_prompt(prompt, entry, self.key, present=True) or ()]
        marks: list[list[bool]] = [[] for _ in prompts]
        for each, right in zip(asked, answer_losses.check_answers(reader, asked, images)):
            marks[each.row].append(right)
        return [(1 - self.strict) * sum(of) / len(of) + self.strict * all(of) if of else
                Failed(f"self_answers: no question can be made of the prompt {prompt!r}")
                for of, prompt in zip(marks, prompts)]
