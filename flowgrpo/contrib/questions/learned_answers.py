"""Answers by a small network in a folder of the form that `flowgrpo reward train` writes.

Its aspects are the answers that it knows, and its text input is the question. P(answer) is the softmax of its scores
over the choices; for yes and no it is sigmoid(yes - no). `scripts/train_starter_answers.py` trains one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgrpo.contrib.learned_rewards.preference import Description, Preference
from flowgrpo.contrib.questions.questions import Question
from flowgrpo.errors import UserError

ALWAYS = ("yes", "no")  # answers known by every such network


@dataclass(frozen=True)
class ByFolder:
    """Probability of the right answer or its logit, or 1 if it is the likeliest of the choices (`score` "share").

    arguments: of `LocalModel`.
    Raises UserError for a folder whose aspects are not answers, and for a choice that is not among them.
    """

    folder: str
    score: str
    arguments: dict[str, Any] = field(default_factory=dict)
    model: Preference = field(init=False, repr=False)
    names: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = tuple(Description.read(Path(self.folder)).aspects)
        if not set(ALWAYS) <= set(names):
            raise UserError(f"reward 'question_answers': {self.folder!r} scores {', '.join(names)}, expected a network "
                            "whose aspects are answers, yes and no among them: a reward from preferences answers no "
                            "questions")
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "model", Preference(self.folder, **self.arguments))

    def right(self, images: Tensor, questions: Sequence[tuple[int, Question]]) -> list[float]:
        """Score n questions. images: [B, 3, H, W] in [0, 1]. questions: n pairs of an image's row and its question."""
        return [self._worth(p, question.choices.index(question.answer))
                for (_, question), p in zip(questions, self.probabilities(images, questions), strict=True)]

    def _worth(self, p: Tensor, right: int) -> float:
        """Return the score of a question from its choices' probabilities. right: place of the right one."""
        if self.score == "logit":
            return float(p[right].log() - (1 - p[right]).log())
        return float(p[right] if self.score == "probability" else p.argmax() == right)

    def probabilities(self, images: Tensor, questions: Sequence[tuple[int, Question]]) -> list[Tensor]:
        """Return each question's probabilities of its choices, float64."""
        places = [self._places(question) for _, question in questions]
        if not questions:
            return []
        scores = self.model.scores(torch.as_tensor(images)[[row for row, _ in questions]],
                                   [question.question for _, question in questions]).double().cpu()
        return [logits[at].softmax(0) for logits, at in zip(scores, places)]

    def _places(self, question: Question) -> list[int]:
        strange = [choice for choice in question.choices if choice not in self.names]
        if strange:
            raise UserError(f"reward 'question_answers': {self.folder!r} knows no answer {strange[0]!r}, which "
                            f"{question.question!r} offers, expected some of {', '.join(self.names)}")
        return [self.names.index(choice) for choice in question.choices]
