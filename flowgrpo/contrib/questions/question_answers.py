"""Reward by questions: a model answers questions about an image, made from its prompt. The idea is UniRL's
(2505.23380).

Here another model answers and is not trained: InstructBLIP, as in `vqascore`, one behind a judge's endpoint, or a
small network; in `self_answers.py` the model that draws. The questions are the prompt's own (`questions.py`).

A small network is a folder of the form that `flowgrpo reward train` writes. Its aspects are the answers that it knows,
and its text input is the question. P(answer) is the softmax of its scores over the choices.
`scripts/build/train_starter_answers.py` trains one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgrpo.contrib.criteria import CachedWriter
from flowgrpo.contrib.learned_rewards.preference import Description, Preference
from flowgrpo.contrib.questions.questions import NUMBERS, Question, of_list, of_prompt, writer
from flowgrpo.errors import UserError
from flowgrpo.rewards.about import TRAINED, About, built_in
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.local_model import model_arguments
from flowgrpo.rewards.vlm_judge.client import Answer
from flowgrpo.rewards.vlm_judge.judge import Asking, fill_template, text_part
from flowgrpo.rewards.vlm_judge.parse import conclusion, declines
from flowgrpo.rewards.vqa_score import VqaScore

AboutImages = Sequence[tuple[int, Question]]  # the row of an image, and a question about it


class ByFolder:
    """Probability of the right answer or its logit, or 1 if it is the likeliest of the choices (`score` "share").

    arguments: of `LocalModel`.
    Raises UserError for a folder whose aspects are not answers, and for a choice that is not among them.
    """

    def __init__(self, folder: str, score: str, **arguments: Any):
        self.folder, self.score, self.names = folder, score, [*Description.read(Path(folder)).aspects]
        if not {"yes", "no"} <= {*self.names}:  # which every such network knows
            raise UserError(f"reward 'question_answers': {folder!r} scores {', '.join(self.names)}, expected a network "
                            "whose aspects are answers, yes and no among them: a reward from preferences answers no "
                            "questions")
        self.model = Preference(folder, **arguments)

    def right(self, images: Tensor, questions: AboutImages) -> list[float]:
        """Score n questions about images [B, 3, H, W] in [0, 1]."""
        scores = []
        for (_, question), p in zip(questions, self.probabilities(images, questions), strict=True):
            right = question.choices.index(question.answer)
            if self.score == "logit":
                scores.append(float(p[right].log() - (1 - p[right]).log()))
            else:
                scores.append(float(p[right] if self.score == "probability" else p.argmax() == right))
        return scores

    def probabilities(self, images: Tensor, questions: AboutImages) -> list[Tensor]:
        """Each question's probabilities of its choices, float64."""
        places = []
        for _, question in questions:
            if strange := [choice for choice in question.choices if choice not in self.names]:
                raise UserError(f"reward 'question_answers': {self.folder!r} knows no answer {strange[0]!r}, which "
                                f"{question.question!r} offers, expected some of {', '.join(self.names)}")
            places.append([self.names.index(choice) for choice in question.choices])
        if not questions:
            return []
        scores = self.model.scores(torch.as_tensor(images)[[row for row, _ in questions]],
                                   [question.question for _, question in questions]).double().cpu()
        return [logits[at].softmax(0) for logits, at in zip(scores, places)]


BY, SCORES = ("vqa", "judge"), ("share", "probability", "logit")
LEAST = 1e-6  # of a probability whose logit is taken


class Answering(VqaScore):
    """Model in this process; its errors name the reward."""

    reward, within = "question_answers", "vqa"


@built_in("question_answers", "hands face anatomy count alignment prompt following vqa tifa judge vlm",
          eq=False, kw_only=True)
class QuestionAnswers:
    """Share of the prompt's questions that a model answers correctly about the image.

    by: "vqa", the model of `vqascore`, with its arguments in `vqa`; "judge", with those of `judge.Asking` in `judge`,
    whose template holds {question} and {choices}; or the folder of a network for `ByFolder`.
    score: "share", of questions whose right answer is chosen; or, which a judge does not give, "probability", the mean
    probability p of the right answers, or "logit", the mean of log p - log(1 - p), without bounds: of a network for
    yes and no the difference of their scores.
    principles: questions about every image whose right answer is yes, in place of a prompt's own (RLBFF, 2509.21319).
    key: metadata key of a prompt's own questions, {"question", "answer", "choices"}. Others are made from GenEval's
    metadata, from prompts of the starter's world, or by `writer`.
    writer: arguments of a language model's endpoint; its questions are cached in `file`.
    dtype, device, batch_size: as in `LocalModel`; None: bf16 and 8 of "vqa", fp32 and 64 of a folder. Not with a judge.

    An image without any answer is Failed.
    Raises UserError for a prompt that yields no question.
    """

    by: str = "vqa"
    score: str = "share"
    principles: Sequence[str] = ()
    key: str = "questions"
    vqa: dict[str, Any] = field(default_factory=dict)
    judge: dict[str, Any] = field(default_factory=dict)
    writer: dict[str, Any] | None = None
    file: str | None = None
    dtype: str | None = None
    device: str | None = None
    batch_size: int | None = None
    _model: "ByVqa | ByJudge | ByFolder" = field(init=False, repr=False)
    _writer: CachedWriter[Question] | None = field(init=False, repr=False)
    about = About(modality="image", range=(0, 1), needs="", licence="Apache-2.0, MIT weights")

    def __post_init__(self) -> None:
        known = self.by in BY or (Path(self.by) / TRAINED).is_file()
        if not known or self.score not in SCORES or self.by == "judge" and self.score != "share":
            raise UserError(f"reward 'question_answers': by is {self.by!r} and score {self.score!r}, expected "
                            f"{', '.join(BY)} or a folder with {TRAINED}, and {', '.join(SCORES)}, the latter two not "
                            "of a judge")
        if isinstance(self.principles, str) or not all(isinstance(text, str) and text for text in self.principles):
            raise UserError(f"reward 'question_answers': principles are {self.principles!r}, expected a list of "
                            "yes-or-no questions")
        if self.file is not None and self.writer is None:
            raise UserError("reward 'question_answers': file keeps what a writer wrote: give writer, or leave it out")
        given = model_arguments("question_answers", self.dtype, self.device, self.batch_size)
        if self.by == "judge" and given:
            raise UserError(f"reward 'question_answers': got {', '.join(given)}, but a judge answers from elsewhere: "
                            "leave them out, or take by: vqa")
        model: ByVqa | ByJudge | ByFolder
        if self.by == "judge":
            model = ByJudge(**self.judge)
        elif self.by == "vqa":
            model = ByVqa(Answering(**{"question": "Question: {} Short answer:"} | given | self.vqa), self.score)
        else:
            model = ByFolder(self.by, self.score, **given)
        vars(self).update(_model=model, _writer=None if self.writer is None else writer(self.writer, self.file))

    @property
    def privileged(self) -> bool:
        return self.by == "judge" or self.writer is not None

    def __call__(self, images: Tensor, prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | Failed]:
        questions = self._questions(prompts, metadata)
        pairs = [(row, question) for row, listed in enumerate(questions) for question in listed]
        values: list[list[float]] = [[] for _ in prompts]
        for (row, _), value in zip(pairs, self._model.right(images, pairs), strict=True):
            values[row] += [] if value is None or isinstance(value, Failed) else [value]
        return [sum(answered) / len(answered) if answered else
                Failed(f"question_answers: {'no answer to a question' if listed else 'no questions'} of the prompt "
                       f"{prompt!r}") for prompt, listed, answered in zip(prompts, questions, values)]

    def _questions(self, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[list[Question]]:
        if self.principles:
            return [of_list([{"question": text, "answer": "yes"} for text in self.principles])] * len(prompts)
        derived = [of_prompt(prompt, entry, self.key) for prompt, entry in zip(prompts, metadata)]
        left = [prompt for prompt, listed in zip(prompts, derived) if listed is None]
        written: dict[str, list[Question]] = {}
        if left:
            if self._writer is None:
                raise UserError(f"reward 'question_answers': no question can be made of the prompt {left[0]!r}: give "
                                f"metadata with {self.key}, GenEval's metadata, or args: {{writer: {{url: ...}}}}")
            written = self._writer(left)
        return [written[prompt] if listed is None else listed for prompt, listed in zip(prompts, derived)]


@dataclass(frozen=True)
class ByVqa:
    """Answers by a `VqaScore`: the probability of the right one, or whether it is the likeliest of the choices."""

    model: VqaScore
    score: str

    def right(self, images: Tensor, questions: AboutImages) -> list[float]:
        expected = self._probabilities(images, [(row, question, question.answer) for row, question in questions])
        if self.score != "share":
            return expected.tolist() if self.score == "probability" else expected.logit(LEAST).tolist()
        others = [(at, row, question, choice) for at, (row, question) in enumerate(questions)
                  for choice in question.choices if choice != question.answer]
        of = torch.tensor([at for at, *_ in others])
        wrong = self._probabilities(images, [other[1:] for other in others])
        likeliest = torch.zeros(len(questions)).scatter_reduce(0, of, wrong, "amax")
        return (expected > likeliest).float().tolist()

    def _probabilities(self, images: Tensor, rows: list[tuple[int, Question, str]]) -> Tensor:
        """Probability of each (image's row, question, answer): [n]."""
        probabilities = torch.empty(len(rows))
        for answer in dict.fromkeys(answer for _, _, answer in rows):
            at = [i for i, row in enumerate(rows) if row[2] == answer]
            model = replace(self.model, answer=answer, parts=self.model.models)
            probabilities[at] = model(images[[rows[i][0] for i in at]], [rows[i][1].question for i in at])
        return probabilities


@dataclass(frozen=True, eq=False, kw_only=True)
class Choosing(Asking):
    """Answers by a model behind an OpenAI-compatible endpoint: 1 for the right one, 0 for another, Failed for none."""

    def right(self, samples: Tensor | Sequence[str], questions: AboutImages) -> list[float | Failed]:
        def question(i: int) -> list[dict[str, Any]]:
            row, entry = questions[i]
            text = fill_template(self._question, question=entry.question, choices=", ".join(entry.choices))
            return [*self._parts(samples[row]), text_part(text)]

        def read(answer: Answer, i: int) -> float | None:
            chosen = None if answer.cut else find_choice(answer.text, questions[i][1].choices)
            return None if chosen is None else float(chosen == questions[i][1].answer)

        return self._values(question, read, len(questions))


@dataclass(frozen=True, eq=False, kw_only=True)
class ByJudge(Choosing):
    """Answers about images."""

    template: str = "{question}\nChoose one of: {choices}. End with a line `Answer: CHOICE`."

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{question}" not in self._question:
            raise UserError("a judge's template names no {question}, expected it where the question belongs")


def find_choice(text: str, choices: Sequence[str]) -> str | None:
    """One choice that an answer names, after its last `Answer:` if it has one; digits match number words."""
    if declines(text):
        return None
    said = re.split(r"\banswer\s*(?:is|:|=)", conclusion(text).lower())[-1]
    said = re.sub(r"\b\d+\b", lambda digit: NUMBERS[int(digit[0])] if int(digit[0]) < len(NUMBERS) else digit[0], said)
    named = [choice for choice in choices if re.search(rf"(?<!\w){re.escape(choice.lower())}(?!\w)", said)]
    return named[0] if len(named) == 1 else None
