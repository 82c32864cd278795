"""Losses of the answers that a pipeline's denoiser gives about the pictures that it drew (UniRL)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from flowgrpo.advantages.group import group_relative
from flowgrpo.contrib.questions.questions import Question, of_prompt
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.methods.supervised import SelfAnswers
from flowgrpo.policies.pipelines import picture_reader
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.rollouts.data_losses import DataLosses, Example, seed_of
from flowgrpo.training.run import Run


class AnswerLosses(DataLosses):
    """Cross entropy, or the policy gradient of GRPO, of the answers to the questions of the pictures' prompts.

    prompts: of the run, held-out ones too; their questions and choices are what can be answered.
    counted: right answers and questions since the last `metrics`.
    Raises UserError for a prompt without questions, or with a picture.
    """

    def __init__(self, part: SelfAnswers, run: Run, prompts: Sequence[Prompt]):
        self.part, self.run = part, run
        self.questions = {prompt.key: questions_of(prompt) for prompt in prompts}
        every = [question for questions in self.questions.values() for question in questions]
        texts = (sorted({question.question for question in every}),
                 sorted({choice for question in every for choice in question.choices}))
        self.head = picture_reader.made(cast(PipelinePolicy, run.policy), part.time, part.width, texts, run.config.seed)
        self.counted = [0, 0]

    def divisor(self, examples: Sequence[Example]) -> int:
        return sum(len(self.questions[example.prompt.key]) for example in examples)

    def __call__(self, examples: Sequence[Example], places: Sequence[int], update: int) -> Iterator[Tensor]:
        pairs = [(row, question) for row, example in enumerate(examples)
                 for question in self.questions[example.prompt.key]]
        contents = [example.content for example in examples if isinstance(example.content, Tensor)]
        logp = self.head(torch.stack(contents), [(row, asked.question, asked.choices) for row, asked in pairs])
        right = self.head.numbers([asked.answer for _, asked in pairs]).to(logp.device)
        self.counted[0] += int(picture_reader.likeliest(logp, right).sum())
        self.counted[1] += len(right)
        weights = torch.tensor([self.part.weight(examples[row].reward) for row, _ in pairs]).to(logp)
        if not self.part.samples:
            yield -(weights * logp.gather(1, right[:, None])[:, 0]).sum()
            return
        generator = torch.Generator().manual_seed(seed_of(self.rollouts.config.seed, update, places[0]))
        drawn = torch.multinomial(logp.detach().exp().cpu(), self.part.samples, True, generator=generator)
        yield (weights * policy_gradient(logp, drawn.to(logp.device), right)).sum()

    def metrics(self, total: Callable[[Sequence[int]], list[int]]) -> dict[str, float]:
        right, count = total(self.counted)
        self.counted = [0, 0]
        return {"data/accuracy": right / count} if count else {}


def questions_of(prompt: Prompt) -> list[Question]:
    """Return the questions of a prompt. Raises UserError if it has none, or brings a picture."""
    questions = of_prompt(prompt.text, prompt.metadata, present=True)
    if prompt.brings is not None or not questions:
        got = "brings a picture, and is read without it" if prompt.brings is not None else "gives no question"
        raise UserError(f"parts.data SelfAnswers: the prompt {prompt.text[:60]!r} {got}: expected metadata with "
                        "questions, GenEval's metadata, or a prompt of the starter, and no image")
    return questions


def policy_gradient(logp: Tensor, drawn: Tensor, right: Tensor) -> Tensor:
    """Return GRPO's loss [n] of K answers drawn to each of n questions: the mean of -A log p, with the reward 1 for the
    right one compared in the group of K.

    One step is made of a draw, so that the ratio is 1. logp: [n, A]; drawn: int64 [n, K]; right: int64 [n].
    """
    advantages = group_relative((drawn == right[:, None]).to(logp.dtype))
    return -(advantages * logp.gather(1, drawn)).mean(1)
