"""Reference policies of the KL: `reference(held, now, epoch) -> held`.

held: the stored snapshots of trainable weights.
now: a function that takes a snapshot of the present weights, those at the start of the epoch, counted from 0.

The KL of that epoch is to the average of the returned snapshots (`Weights.reference`), or to the base model if there
are none. The trainer asks once per epoch and stores the snapshots in its checkpoints, so a resume is exact bit for bit.
Only trainable weights are ever copied, on the CPU.
"""

import string
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

from torch import Tensor

from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError
from flowgrpo.parts import AtLeast, OneOf, part

Snapshot = dict[str, Tensor]


@part("reference")
class Base:
    """Base model in every epoch: the adapter is off, or without one the first weights are restored. Copies
    nothing."""

    def __call__(self, held: list[Snapshot], now: Callable[[], Snapshot], epoch: int) -> list[Snapshot]:
        return []


@part("reference")
class EMA:
    """Moving average of the weights, updated at every epoch's start: decay * average + (1 - decay) * weights (the
    moving anchor of WARP, 2406.16768, which updates it with every optimizer step).

    decay 1 stays at the first weights, 0 is PreviousPolicy(1). The factors A and B of a LoRA are averaged separately,
    as `train.ema` does.
    """

    decay: Annotated[float, AtLeast(0, to=1)] = 0.99

    def __call__(self, held: list[Snapshot], now: Callable[[], Snapshot], epoch: int) -> list[Snapshot]:
        if not held:
            return [now()]
        return [{key: held[0][key].lerp(value, 1 - self.decay) for key, value in now().items()}]


@part("reference")
class PreviousPolicy:
    """Policy at the start of the epoch, or with `every` above 1 at the start of the last epoch divisible by it (the
    hard update of TR-DPO, 2404.09656).

    With every 1 the KL limits the step of one epoch; over many epochs the policy may move any distance from the base.
    """

    every: Annotated[int, AtLeast(1)] = 1

    def __call__(self, held: list[Snapshot], now: Callable[[], Snapshot], epoch: int) -> list[Snapshot]:
        return [now()] if not held or epoch % self.every == 0 else held


@part("reference")
class WeightAverage:
    """Average of the last `size` snapshots, one at the start of every `every`-th epoch, the first among them (weight
    soup of the run itself as reference; `Soup` is that of SALSA, of models trained before).

    For LoRAs the merged weights are averaged, the products B A, not their factors: `Weights.reference`.
    """

    every: Annotated[int, AtLeast(1)] = 10
    size: Annotated[int, AtLeast(1)] = 2

    def __call__(self, held: list[Snapshot], now: Callable[[], Snapshot], epoch: int) -> list[Snapshot]:
        return [*held, now()][-self.size:] if not held or epoch % self.every == 0 else held


@part("reference", target="model")
class Teacher(Base):
    """Another model, frozen, in every epoch: a KL to it with a falling weight is distillation in addition to the reward
    (KDRL, 2506.02208).

    model: a directory or a hub id, loaded once. Of a language model its tokenizer must equal the policy's, of a
        pipeline its denoisers must read the same latents, embeddings and times. Empty: the base model is the teacher.
    only_below: the KL counts for samples with a smaller total reward alone (KDRL's reward-guided masking); None: all.
    """

    model: str = ""
    only_below: float | None = None

    def require_config(self, config: Config, of_text: bool) -> None:
        """Raise UserError for a teacher of a pipeline whose processes share what they hold."""
        if self.model and not of_text and (config.memory.shard or config.memory.context_parallel > 1):
            raise UserError("parts.reference.model is a teacher, which memory.shard and memory.context_parallel do not "
                            "share out: leave them out")


@part("reference", target="model")
class Teachers:
    """A teacher per source of prompts, frozen, in every epoch: a KL to each on the prompts of its source distils all
    into one policy (DiffusionOPD, 2605.15055).

    models: the teachers by source, {geneval: runs/geneval}: LoRAs of the run's layers, of any rank, as finished runs,
        folders or files; with adapter.rank 0 folders of whole models. Empty: the base model for all.
    key: of the prompts' metadata, whose value is the source.
    """

    models: tuple[tuple[str, str], ...] = ()
    key: str = "task"

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", tuple((str(source), str(path)) for source, path in
                                                 dict(self.models).items()))  # a recipe gives keys with values

    def __call__(self, held: list[Snapshot], now: Callable[[], Snapshot], epoch: int) -> list[Snapshot]:
        return held

    def place(self, metadata: dict[str, Any]) -> int:
        """Number of the teacher of a prompt; 0 without any. Raises ValueError for a source without one."""
        return [source for source, _ in self.models].index(str(metadata[self.key])) if self.models else 0

    def check(self, setup: Any) -> None:  # a Setup, of a higher layer
        """Raise UserError without teachers, and for the first training prompt whose source has none."""
        known = ", ".join(source for source, _ in self.models)
        if not self.models:
            raise UserError("parts.reference.models is empty: expected a teacher per source of prompts, such as "
                            "{counting: runs/counting, ocr: runs/ocr}")
        for prompt in setup.split[0]:
            if str(prompt.metadata.get(self.key)) not in dict(self.models):
                source = prompt.metadata.get(self.key)
                raise UserError(f"parts.reference.models has no teacher for {self.key} {source!r} of the prompt "
                                f"{prompt.text[:60]!r}: expected one of {known}, or add its teacher")


@part("reference", target="model")
class Soup:
    """Weighted average of trained models, frozen, in every epoch (SALSA, 2411.01798: the mean of two models that were
    tuned independently from one base).

    models: LoRAs of the run's layers, of any rank, as finished runs, folders or files; with adapter.rank 0 folders of
        whole models. Of LoRAs the products B A are averaged. Empty: the base model.
    shares: positive, one per model, summing to 1; empty: equal ones.
    """

    models: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.shares and (len(self.shares) != len(self.models) or min(self.shares) <= 0
                            or abs(sum(self.shares) - 1) > 1e-6):
            raise ValueError(f"Soup: shares are {list(self.shares)} for {len(self.models)} models, expected a positive "
                             "one per model, summing to 1")

    def __call__(self, held: list[Snapshot], now: Callable[[], Snapshot], epoch: int) -> list[Snapshot]:
        return held  # as `TrainableWeights.soup` reads it


# What a template reads beside the prompt.
FEEDBACK: dict[str, list[str]] = {
    "sibling": ["right"], "contrast": ["right", "wrong"], "answer": ["answer"], "none": []}


def names_in(template: str) -> set[str]:
    return {name for _, name, *_ in string.Formatter().parse(template) if name is not None}


@part("reference", target="model", makes_prompts=True)  # of the samples of an epoch
class SelfTeacher(Base):
    """Present policy under a prompt with more information, without a gradient: a KL to it distils the difference into
    the plain prompt (SDPO, 2601.20802). Equal prompts have a KL of 0.

    feedback: "sibling": the best other completion of the group with a total reward of at least `right`. "contrast":
        that one, and the most common completion with less, as in SSB (2512.05105). "answer": the prompt's reference
        answer. "none": the template alone, for a richer prompt of images.
    template: the teacher's prompt, of {prompt}, {right}, {wrong} and {answer}. A sample without what it names has the
        plain prompt, and so a KL of 0.
    only_below: the KL counts for samples with a smaller total reward alone; None: all.
    """

    feedback: Annotated[str, OneOf(FEEDBACK)] = "sibling"
    template: str = "{prompt}\n\nA correct solution:\n{right}\n\nSolve it again:"
    right: float = 0.5
    only_below: float | None = None

    def __post_init__(self) -> None:
        given, fits = names_in(self.template), {"prompt", *FEEDBACK[self.feedback]}
        if given != fits:
            raise ValueError(f"SelfTeacher: template has {', '.join(sorted(given)) or 'no field'}, expected "
                             f"{', '.join(sorted(fits))} for feedback {self.feedback}")

    def require_config(self, config: Config, of_text: bool) -> None:
        """Raise UserError for feedback that a pipeline has none of."""
        if not of_text and self.feedback in ("sibling", "contrast"):
            raise UserError(f"parts.reference.feedback is {self.feedback}, completions of the group, and images have "
                            "none: set it to none, with a template such as '{prompt}, in sharp focus'")

    def prompts(self, texts: list[str], completions: list[str], rewards: list[float], answers: list[str | None]
                ) -> list[str]:
        """Teacher's prompt of each of a group's samples.

        texts: their prompts, all [n]; completions: what was written, "" of images; rewards: the totals; answers: the
        prompts' own, None without one.
        """
        named = names_in(self.template)
        wrong = Counter(completion for completion, reward in zip(completions, rewards) if reward < self.right)
        shown = []
        for place, text in enumerate(texts):
            right = [i for i, reward in enumerate(rewards) if reward >= self.right and i != place]
            known = {"prompt": text, "answer": answers[place],
                     "right": completions[max(right, key=lambda i: rewards[i])] if right else None,
                     "wrong": wrong.most_common(1)[0][0] if wrong else None}
            shown.append(text if any(known[name] is None for name in named) else self.template.format(**known))
        return shown
