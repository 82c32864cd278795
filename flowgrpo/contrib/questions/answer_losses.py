"""Questions about own images, answered by the weights that drew them: losses, and what is held out (UniRL).

`SelfAnswers` says which images and answers. The policy draws; `answering` of it reads images and answers in text.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowgrpo.advantages.group import group_relative
from flowgrpo.contrib.guard import fell
from flowgrpo.contrib.questions.questions import Question, of_prompt
from flowgrpo.contrib.questions.scene_answers import sample_question, things
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation.measured import Measured, evenly
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.supervised import SelfAnswers
from flowgrpo.rewards.preprocessing import eight_bit
from flowgrpo.rewards.starter.scene import read
from flowgrpo.rollouts.data_losses import DataLosses, Example, seed_of
from flowgrpo.starter import lattice, scenes
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics, Run

OWN = "self_answers"  # the reward by these answers
GREY = 0.5
ASKED = 2  # scenes of each held-out prompt, with a question about each
TOGETHER = 64  # questions that are read at once where nothing is trained
AGREEMENT = "agreement"
WINDOW = 10  # epochs
FALSE_ALARMS = 0.01  # probability of a warning without a cause in a run
MILLIONTHS = 10**6  # a share is summed over processes in whole numbers
_READERS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


@dataclass(frozen=True)
class Asked:
    """Question about an image, as the model reads it, and its right answer. row: the image's."""

    row: int
    question: str
    answer: str


def reader_of(policy: Any, length: int) -> Any:
    """Policy of answers, of `length` tokens at most, by the weights of one that draws images; made once.

    Raises UserError for a model that only draws."""
    if not hasattr(policy, "answering"):
        raise UserError("answers about own images need a model that reads and generates images by the same weights, "
                        f"such as Janus: got {type(policy).__name__}; another model answers by the reward "
                        "question_answers")
    known = _READERS.setdefault(policy, {})
    if length not in known:
        known[length] = policy.answering(policy.text.model_copy(update={"max_tokens": length}))
    return known[length]


# --- questions -------------------------------------------------------------------------------------------------------

def of_scene(image: Tensor, dice: random.Random) -> tuple[str, str] | None:
    """Balanced question about an image [3,64,64] of the starter's world and its answer; None where a blob in it is no
    object, or it is empty."""
    seen = things(read(image))
    return sample_question(seen, dice) if seen and all(each.shape and each.colour for each in seen) else None


def of_claims(prompt: Prompt, dice: random.Random) -> tuple[str, str]:
    """Question of a prompt and the prompt's answer: kinds are equally likely, and in them yes and no.

    Raises UserError for a prompt without questions."""
    kinds: dict[tuple[str, ...], list[Question]] = {}
    for each in of_prompt(prompt.text, prompt.metadata, present=True) or ():
        yes_or_no = each.answer if each.answer in ("yes", "no") else ""
        kinds.setdefault((*each.question.split()[:2], yes_or_no), []).append(each)
    if not kinds:
        raise UserError(f"parts.data SelfAnswers: the prompt {prompt.text[:60]!r} gives no question: expected metadata "
                        "with questions, GenEval's metadata, or a prompt of the starter")
    chosen = dice.choice(kinds[dice.choice(sorted(kinds))])
    return chosen.question, chosen.answer


def sample_questions(part: SelfAnswers, prompts: Sequence[Prompt], pictures: Tensor, dice: random.Random
                     ) -> list[Asked]:
    """Questions about images [B,3,H,W] of these prompts, as the model reads them."""
    found = []
    for row, (prompt, image) in enumerate(zip(prompts, pictures)):
        for _ in range(part.questions):
            pair = of_scene(image, dice) if part.reader == "scene" else of_claims(prompt, dice)
            if pair is not None:
                found.append(Asked(row, part.condition.format(prompt=pair[0], source=""), pair[1]))
    return found


def as_processor_images(pictures: Tensor) -> list[Any]:
    """Images [B,3,H,W] in [0, 1] as images that processors read."""
    return [Image.fromarray(image) for image in eight_bit(pictures)]


def encode_questions(reader: Any, asked: Sequence[Asked], images: Sequence[Any]) -> Any:
    return reader.encode([each.question for each in asked], images=[images[each.row] for each in asked])


def normalise_answer(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(".")


@torch.no_grad()
def check_answers(reader: Any, asked: Sequence[Asked], pictures: Tensor) -> list[bool]:
    """True for each question whose likeliest answer is right. pictures: [B,3,H,W]."""
    images, right = as_processor_images(pictures), []
    for at in range(0, len(asked), TOGETHER):
        some = asked[at:at + TOGETHER]
        texts = reader.sample(encode_questions(reader, some, images), Decoding(), reader.generators(range(len(some))),
                              torch.ones(len(some), dtype=torch.bool)).texts
        right += [normalise_answer(text) == normalise_answer(each.answer) for text, each in zip(texts, some)]
    return right


# --- the loss --------------------------------------------------------------------------------------------------------

class AnswerLosses(DataLosses):
    """Cross entropy, or the policy gradient of GRPO, of answers about the run's own images; and of the images.

    The mean is over the images of a batch. counted: right answers, in millionths, and questions since the last
    `metrics`: shares of drawn answers that are right, or probabilities of the right ones.
    """

    def __init__(self, part: SelfAnswers, run: Run):
        self.part, self.run = part, run
        self.policy = cast(Any, run.policy)
        self.reader = reader_of(self.policy, part.length)
        self.counted = [0, 0]

    def __call__(self, examples: Sequence[Example], places: Sequence[int], update: int) -> Iterator[Tensor]:
        ids = torch.stack([cast(Tensor, example.content) for example in examples])
        pictures = self.policy.decode_cached(ids)
        seed = seed_of(self.rollouts.config.seed, update, places[0])
        weights = torch.tensor([self.part.weight(example.reward) for example in examples])
        asked = sample_questions(self.part, [example.prompt for example in examples], pictures, random.Random(seed))
        if asked:
            losses, right = self._of_answers(asked, as_processor_images(pictures), seed)
            self.counted[0] += round(MILLIONTHS * right.sum().item())
            self.counted[1] += len(asked)
            rows = torch.tensor([each.row for each in asked])
            yield (weights[rows].to(losses) * losses).sum() / self.part.questions
        if self.part.images:
            # The summed cross entropy of the images, each the mean of its tokens'.
            given = self.rollouts.conditioning([example.prompt for example in examples])
            scored = self.policy.log_probs(given, torch.arange(len(ids)), ids, torch.ones_like(ids, dtype=torch.bool),
                                           Decoding())
            yield self.part.images * -(weights.to(scored.logp) * scored.logp.mean(1)).sum()

    def _of_answers(self, asked: Sequence[Asked], images: Sequence[Any], seed: int) -> tuple[Tensor, Tensor]:
        """Loss of each of n questions [n], and how right its answers are [n]."""
        read, count = encode_questions(self.reader, asked, images), self.part.samples
        if not count:
            ids, mask = self.reader.pad_answers([self.reader.answer(each.answer) for each in asked])
            logp = self.reader.log_probs(read, torch.arange(len(asked)), ids, mask, Decoding()).logp.sum(1)
            return -logp, logp.detach().exp()
        of = torch.arange(len(asked)).repeat_interleave(count)
        with torch.no_grad():
            drawn = self.reader.sample(read.rows(of), Decoding(), self.reader.generators(
                seed_of(seed, place, count) for place in range(len(of))), torch.zeros(len(of), dtype=torch.bool))
        right = torch.tensor([normalise_answer(text) == normalise_answer(asked[place].answer)
                              for text, place in zip(drawn.texts, of)]).float()
        logp = self.reader.log_probs(read, of, drawn.ids, drawn.mask, Decoding()).logp.sum(1)
        return policy_gradient(logp.view(-1, count), right.view(-1, count).to(logp)), right.view(-1, count).mean(1)

    def metrics(self, total: Callable[[Sequence[int]], list[int]]) -> dict[str, float]:
        right, count = total(self.counted)
        self.counted = [0, 0]
        return {"data/accuracy": right / MILLIONTHS / count} if count else {}


def policy_gradient(logp: Tensor, right: Tensor) -> Tensor:
    """GRPO's loss [n] of K answers drawn to each of n questions: the mean of -A log p, A their rewards less the
    mean of the K, without a division.

    One step is made of a draw, so that the ratio is 1. logp: of whole answers [n,K]; right: their rewards [n,K].
    """
    return -(group_relative(right, scale="none") * logp).mean(1)


# --- what is held out ------------------------------------------------------------------------------------------------

def agreement(own: Tensor, checked: Tensor) -> Tensor:
    """Share [P] of each group's samples [P,G] on which two rewards agree: both are 1, or neither. NaN: of none."""
    found = ((own >= 1) == (checked >= 1)).float()
    return found.where(~(own.isnan() | checked.isnan()), torch.nan).nanmean(1)


class HeldOutAnswers(Extension):
    """Answers about held-out images, with the images shown and hidden, and the imbalance of both tasks.

    In the starter's world the images are rendered scenes of the held-out prompts, with balanced questions; elsewhere
    those shown held-out images of the run that the checker finds right, and without a checker the first reward. Hidden
    images are grey; in the starter's world its empty ground, since a grey image is of another world. The imbalance is
    the difference of this reward of the images and the answers' share. The formula is ours: UniRL (2505.23380) names a
    metric of imbalance, and no source has it.

    A model whose own answers are a reward learns to please itself. With another reward, the checker, the run shows how
    often both agree: on each epoch's samples where the checker is trained on or has the weight 0, and on held-out
    images, where `eval.stop` can read it. Every WINDOW epochs it warns if they agree less than at first.
    agreed: of each group so far, by epoch. asked: number of questions that were asked last.
    """

    name = "held_out_answers"
    judges = (AGREEMENT,)

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        self.agreed: list[list[float]] = []
        part = trainer.method.loss.data
        self.part = part if isinstance(part, SelfAnswers) else SelfAnswers()
        self.found: list[Metrics] = []
        self.asked = 0

    @classmethod
    def require(cls, setup: Setup) -> None:
        if {*setup.config.trained} == {OWN} and not setup.config.extra_rewards:
            raise UserError(f"reward {OWN!r} is the model's judgement of itself, which can rise while the images get "
                            "worse: add another reward, or a checker to eval.rewards")
        if setup.config.eval.stop and setup.config.eval.stop.reward == AGREEMENT and not (
                OWN in setup.measured and len(setup.measured) > 1):
            raise UserError(f"eval.stop reads {AGREEMENT!r}, which compares the reward {OWN!r} with a checker: got "
                            f"{', '.join(setup.measured)}, expected both")

    def _compared(self, measured: Iterable[str]) -> list[str]:
        """Names of the model's own judgement and of the checker: the first other reward; empty without both."""
        names = [*measured]
        return [OWN, next(name for name in names if name != OWN)] if OWN in names and len(names) > 1 else []

    def on_credited(self, epoch: Epoch) -> None:
        names = [*self.trainer.scoring.functions]
        if pair := self._compared(names):
            scores = epoch.groups.prompts_and_scores()[1]
            own, checked = (scores[..., names.index(name)] for name in pair)
            self.agreed.append([share for share in agreement(own, checked).tolist() if share == share])

    def on_trained(self, epoch: Epoch) -> Metrics:
        if not self.agreed or not self.agreed[-1]:
            return {}
        count, trainer = len(self.agreed), self.trainer
        first, now = (list(chain(*epochs)) for epochs in (self.agreed[:WINDOW], self.agreed[-WINDOW:]))
        level = FALSE_ALARMS * WINDOW / trainer.config.train.epochs
        if count % WINDOW == 0 and count > WINDOW and fell(first, now, level):
            checker = self._compared(trainer.scoring.functions)[1]
            trainer.log(f"epoch {trainer.epoch + 1}: the model's own answers and {checker} agree about "
                        f"{np.mean(now):.2f} of the samples, at first about {np.mean(first):.2f}: the model learns to "
                        "please itself, so look at its images; eval.stop can end such a run")
        return {"answers/agreement": float(np.mean(self.agreed[-1]))}

    def judge(self, measured: Measured) -> Metrics:
        if not (pair := self._compared(measured.scores)):
            return {}
        own, checked = (torch.tensor(measured.scores[name])[None] for name in pair)
        return {AGREEMENT: agreement(own, checked).item()}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {"agreed": self.agreed}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self.agreed = values.get("agreed", [])

    def on_base(self, measured: Measured, functions: Mapping[str, Any]) -> None:
        with self.trainer.policy.reference():
            self.found = [self.on_measured(measured)]

    def on_finished(self, measured: Measured) -> None:
        if self.trainer.progress.best.anew:  # the base answered about other prompts
            self.found = []
        self.found.append(self.on_measured(measured))

    def summary(self) -> str | None:
        if not any(self.found):
            return None
        told = [", ".join(f"{name.partition('/')[2]} {value:.3f}" for name, value in found.items())
                for found in self.found]
        return f"held-out answers, {self.asked} questions: " + " -> ".join(told)

    def on_measured(self, measured: Measured) -> Metrics:
        """Shares of right answers about what an evaluation holds out; empty where nothing can be asked."""
        if not measured.prompts:  # eval.prompts: 0
            return {}
        samples = self.trainer.config.eval.samples
        # What the model's own answers call right, its answers are right about: the checker says what is.
        pair = self._compared(measured.scores)
        judge = pair[1] if pair else next(iter(measured.scores))
        if self.part.reader == "scene":  # a rendered scene [3,64,64] of each held-out prompt, `ASKED` times
            rng, prompts = np.random.default_rng(0), measured.prompts[::samples] * ASKED
            drawn = [lattice.paint(lattice.place(scenes.parse(prompt.text), rng)) for prompt in prompts]
            pictures = torch.from_numpy(np.stack(drawn))
        else:  # the shown held-out images that are right
            of = [samples * place for place in evenly(len(measured.prompts) // samples, len(measured.images))]
            score = measured.scores[judge]
            right = [place for place, row in enumerate(of) if score[row] >= self.part.source.right]
            prompts = [measured.prompts[of[place]] for place in right]
            pictures = torch.as_tensor(measured.images)[right]
        asked = sample_questions(self.part, prompts, pictures, random.Random(0)) if prompts else []
        self.asked = len(asked)
        if not asked:
            return {}
        reader = reader_of(self.trainer.policy, self.part.length)
        before = self.trainer.policy.evaluations
        hidden = torch.full_like(pictures, lattice.GROUND if self.part.reader == "scene" else GREY)
        shares = [float(np.mean(check_answers(reader, asked, images))) for images in (pictures, hidden)]
        self.trainer.policy.evaluations = before
        return {"answers/right": shares[0], "answers/hidden": shares[1],
                "answers/imbalance": abs(measured.mean()[judge] - shares[0])}
