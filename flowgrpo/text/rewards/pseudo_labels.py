"""Labels that a run makes or mends from its own majorities: semi-supervised and noisily labelled prompts.

    reward: {pseudo_labels: {args: {similarity: 0.9}}}

These rewards remember the epochs before. Their memory is a run's (`Context.memory`), kept in its checkpoints; they need
one process.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.text.rewards.answer_keys import LICENCE, keys, several
from flowgrpo.text.rewards.majority import mode, reader

# --- pure ------------------------------------------------------------------------------------------------------------


def slope(values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through values at 0, 1, 2, ...; 0 for fewer than two."""
    middle, mean = (len(values) - 1) / 2, sum(values) / max(1, len(values))
    squares = sum((place - middle) ** 2 for place in range(len(values)))
    return sum((place - middle) * (value - mean) for place, value in enumerate(values)) / squares if squares else 0.0


def refined(history: Sequence[tuple[str | None, float]], window: int) -> str | None:
    """Return the answer that replaces a label (Online Label Refinement); None: the label stays.

    history: of each visit so far the group's majority answer and its share. The last `window` visits have to agree on
    one answer, and the share of it to rise.
    """
    last = history[-window:]
    answers = {answer for answer, _ in last}
    if len(last) < window or len(answers) > 1 or not slope([share for _, share in last]) > 0:
        return None
    return last[0][0]


def alike(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine of two trajectories of pass rates, over their common length; 0 if one has no value above 0."""
    pairs = list(zip(first, second))
    norms = [math.sqrt(sum(pair[side] ** 2 for pair in pairs)) for side in (0, 1)]
    return sum(one * other for one, other in pairs) / (norms[0] * norms[1]) if min(norms) > 0 else 0.0


def mean_trajectory(trajectories: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of trajectories at every visit, of those that reach it."""
    longest = max(map(len, trajectories), default=0)
    reaching = [[each[place] for each in trajectories if len(each) > place] for place in range(longest)]
    return [sum(values) / len(values) for values in reaching]


# --- for a recipe ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Remembering:
    """Reward of groups that keeps a history per prompt: base class.

    key: of the metadata, the label, a text or a list of accepted ones. kind: of answers, as in `majority`.
    """

    key: str = "answer"
    kind: str = "text"
    reward: ClassVar[str]
    group = True
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        if self.kind not in ("text", "number"):
            raise UserError(f"reward {self.reward!r}: kind is {self.kind!r}, expected text or number")

    def __call__(self, completions: Sequence[str], prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
                 group: int, memory: dict[str, Any] | None = None, epoch: int | None = None) -> list[float | None]:
        past = Past({} if memory is None else memory, epoch)
        labels, read = keys(self.reward, metadata, self.key, prompts, several), reader(self.kind)
        values: list[float | None] = []
        for start in range(0, len(completions), group):
            answers = [read(text) for text in completions[start:start + group]]
            label = labels[start] and {read(f"<answer>{text}</answer>") for text in labels[start] or []}
            values += self._scored(past, prompts[start], answers, label or None)
        return values

    def _scored(self, past: Past, prompt: str, answers: Sequence[Hashable | None],
                label: set[Hashable | None] | None) -> list[float | None]:
        """Return the scores of a group's answers. label: accepted answers, None if the prompt has no label."""
        raise NotImplementedError


@dataclass(frozen=True)
class Past:
    """History of prompts: a list of visits, [epoch, ...] each, by prompt. epoch: None to remember nothing."""

    memory: dict[str, Any]
    epoch: int | None

    def visits(self, prompt: str, entry: list[Any]) -> list[list[Any]]:
        """Return a prompt's visits with the present one behind those of earlier epochs."""
        history = [visit for visit in self.memory.get(prompt, []) if visit[0] != self.epoch]
        history.append([self.epoch, *entry])
        if self.epoch is not None:
            self.memory[prompt] = history
        return history


@dataclass(frozen=True, eq=False)
class RefinedLabels(Remembering):
    """1 for the answer of a prompt's label, which a rising and stable majority replaces (Online Label Refinement).

    A label is replaced by the group's majority answer once that has been the same for the last `window` visits of the
    prompt with a rising share. key, kind: as in `Remembering`. None for a prompt without a label.
    """

    window: int = 3
    reward = "refined_labels"
    keyed = True  # nothing is scored without the key

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 2:
            raise UserError(f"reward 'refined_labels': window is {self.window}, expected 2 visits or more")

    def _scored(self, past: Past, prompt: str, answers: Sequence[Hashable | None],
                label: set[Hashable | None] | None) -> list[float | None]:
        if label is None:
            return [None] * len(answers)
        best = mode(answers)
        history = past.visits(prompt, [None if best is None else str(best), answers.count(best) / len(answers)])
        better = refined([(answer, share) for _, answer, share in history], self.window)
        del history[:-self.window]  # in the memory too
        accepted = {str(each) for each in label} if better is None else {better}
        return [float(answer is not None and str(answer) in accepted) for answer in answers]


@dataclass(frozen=True, eq=False)
class PseudoLabels(Remembering):
    """1 for the answer of a prompt's label; without one, for the majority's answer where the prompt is trusted (TraPO).

    A prompt without a label is trusted once its pass rates over its visits, measured by the majority, are like the mean
    of those of labelled prompts: cosine of at least `similarity`, over at least `visits`. Else it has no score.
    key, kind: as in `Remembering`. After TraPO, whose trajectories are compared per database of labelled prompts.
    """

    similarity: float = 0.9
    visits: int = 2
    reward = "pseudo_labels"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.similarity <= 1 or self.visits < 1:
            raise UserError(f"reward 'pseudo_labels': similarity is {self.similarity}, visits {self.visits}, expected "
                            "above 0 up to 1, and 1 or more")

    def _scored(self, past: Past, prompt: str, answers: Sequence[Hashable | None],
                label: set[Hashable | None] | None) -> list[float | None]:
        best = mode(answers)
        accepted = {best} if label is None else label
        right = [float(answer is not None and answer in accepted) for answer in answers]
        rates = [rate for _, _, rate in past.visits(prompt, [label is not None, sum(right) / len(right)])]
        if label is not None:
            return list(right)
        known = [[rate for _, _, rate in history] for history in past.memory.values() if history[0][1]]
        trusted = len(rates) >= self.visits and alike(rates, mean_trajectory(known)) >= self.similarity
        return list(right) if trusted else [None] * len(right)
