"""Rewards by majorities of a group's answers: agreement with them, and labels that a run makes or mends from them.

`majority` needs no answer key: it trains on prompts alone. `pseudo_labels` and `refined_labels` are for prompts of
which some have no label, or a wrong one. They remember the epochs before in the memory of the run (`Context.memory`),
which its checkpoints keep, and need one process.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, built_in
from flowgrpo.text.rewards.answer_keys import LICENCE, Metadata, Texts, keys, several
from flowgrpo.text.rewards.numeric import NumericMatch
from flowgrpo.text.rewards.rules import ExactMatch


def mode(answers: Sequence[Hashable | None]) -> Hashable | None:
    """The most frequent answer, of ties the one that appears first; None, no answer, does not count."""
    known = [answer for answer in answers if answer is not None]
    return statistics.mode(known) if known else None


def agreement(answers: Sequence[Hashable | None]) -> list[float]:
    """1 for the group's most frequent answer (`mode`), otherwise 0 (MM-UPT)."""
    best = mode(answers)
    return [float(answer is not None and answer == best) for answer in answers]


def frequencies(answers: Sequence[Hashable | None]) -> list[float]:
    """The share of the group that has a sample's answer (TTRV); 0 for no answer."""
    counts = Counter(answers)
    return [0.0 if answer is None else counts[answer] / len(answers) for answer in answers]


def certainty(answers: Sequence[Hashable | None]) -> float:
    """1 less the entropy of a group's answers over that of answers that all differ: 1 where all agree."""
    shares = [count / len(answers) for count in Counter(answers).values()]
    return 1 - sum(-share * math.log(share) for share in shares) / math.log(len(answers)) if len(answers) > 1 else 1.0


@built_in("majority")
class Majority:
    """Agreement of a completion's answer with those of its group; no answer key is read.

    score: "vote", 1 for the group's most frequent answer, else 0 (MM-UPT), or "share", the answer's share of the group
    (TTRV).
    certainty: weight of the group's certainty, 1 less the normalised entropy of its answers (TTRV). It is the same for
    all samples of a group, so only an advantage with a baseline beyond the group reads it, such as `{scale: running}`.
    kind: "text", answers as `exact_match` reads them, or "number", as `numeric_match` does; without a number there is
    no answer.
    """

    score: str = "vote"
    certainty: float = 0.0
    kind: str = "text"
    group = True
    about = About(modality="text", range=(0, None), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        if self.score not in ("vote", "share") or self.kind not in ("text", "number") or not self.certainty >= 0:
            raise UserError(f"reward 'majority': score is {self.score!r}, kind {self.kind!r}, certainty "
                            f"{self.certainty}, expected vote or share, text or number, and 0 or more")

    def __call__(self, completions: Texts, prompts: Texts, metadata: Metadata, group: int) -> list[float]:
        read = reader(self.kind)
        rate = agreement if self.score == "vote" else frequencies
        values: list[float] = []
        for start in range(0, len(completions), group):
            answers = [read(text) for text in completions[start:start + group]]
            values += [value + self.certainty * certainty(answers) for value in rate(answers)]
        return values


def reader(kind: str) -> Callable[[str], Hashable | None]:
    if kind == "text":
        return lambda text: ExactMatch().answer(text) or None
    return lambda text: getattr(NumericMatch().answer(text), "value", None)


def slope(values: Sequence[float]) -> float:
    """The slope of the least-squares line through values at 0, 1, 2, ...; 0 for fewer than two."""
    return statistics.linear_regression(range(len(values)), values).slope if len(values) > 1 else 0.0


def refine_label(history: Sequence[tuple[str | None, float]], window: int) -> str | None:
    """The answer that replaces a label (Online Label Refinement); None: the label stays.
    history: of each visit so far the group's majority answer and its share. The last `window` visits have to agree on
    one answer, and the share of it to rise."""
    last = history[-window:]
    stable = len(last) == window and len({answer for answer, _ in last}) == 1
    return last[0][0] if stable and slope([share for _, share in last]) > 0 else None


def alike(first: Sequence[float], second: Sequence[float]) -> float:
    pairs = list(zip(first, second))
    norms = [math.sqrt(sum(pair[side] ** 2 for pair in pairs)) for side in (0, 1)]
    return sum(one * other for one, other in pairs) / (norms[0] * norms[1]) if min(norms) > 0 else 0.0


def mean_trajectory(trajectories: Sequence[Sequence[float]]) -> list[float]:
    reaching = [[value for value in column if value is not None] for column in zip_longest(*trajectories)]
    return [sum(values) / len(values) for values in reaching]


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

    def __call__(self, completions: Texts, prompts: Texts, metadata: Metadata,
                 group: int, memory: dict[str, Any] | None = None, epoch: int | None = None) -> list[float | None]:
        memory = {} if memory is None else memory
        labels, read = keys(self.reward, metadata, self.key, prompts, several), reader(self.kind)
        values: list[float | None] = []
        for start in range(0, len(completions), group):
            answers = [read(text) for text in completions[start:start + group]]
            label = labels[start] and {read(f"<answer>{text}</answer>") for text in labels[start] or []}
            values += self._score(memory, epoch, prompts[start], answers, label or None)
        return values

    def _score(self, memory: dict[str, Any], epoch: int | None, prompt: str, answers: Sequence[Hashable | None],
               label: set[Hashable | None] | None) -> list[float | None]:
        """The scores of a group's answers. memory: a list of visits, [epoch, ...] each, by prompt. epoch: None to
        remember nothing. label: accepted answers, None if the prompt has no label."""
        raise NotImplementedError


def add_visit(memory: dict[str, Any], epoch: int | None, prompt: str, entry: list[Any]) -> list[list[Any]]:
    """A prompt's visits with the present one behind those of earlier epochs."""
    history = [*(visit for visit in memory.get(prompt, []) if visit[0] != epoch), [epoch, *entry]]
    if epoch is not None:
        memory[prompt] = history
    return history


@built_in("refined_labels", eq=False)
class RefinedLabels(Remembering):
    """1 for the answer of a prompt's label, which a rising and stable majority replaces (Online Label Refinement).

    A label is replaced by the group's majority answer once that has been the same for the last `window` visits of the
    prompt with a rising share. key, kind: as in `Remembering`. None for a prompt without a label.
    """

    window: int = 3
    keyed = True  # nothing is scored without the key

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 2:
            raise UserError(f"reward 'refined_labels': window is {self.window}, expected 2 visits or more")

    def _score(self, memory: dict[str, Any], epoch: int | None, prompt: str, answers: Sequence[Hashable | None],
               label: set[Hashable | None] | None) -> list[float | None]:
        if label is None:
            return [None] * len(answers)
        best = mode(answers)
        entry = [None if best is None else str(best), answers.count(best) / len(answers)]
        history = add_visit(memory, epoch, prompt, entry)
        better = refine_label([(answer, share) for _, answer, share in history], self.window)
        del history[:-self.window]  # in the memory too
        accepted = {str(each) for each in label} if better is None else {better}
        return [float(answer is not None and str(answer) in accepted) for answer in answers]


@built_in("pseudo_labels", eq=False)
class PseudoLabels(Remembering):
    """1 for the answer of a prompt's label; without one, for the majority's answer where the prompt is trusted (TraPO).

    A prompt without a label is trusted once its pass rates over its visits, measured by the majority, are like the mean
    of those of labelled prompts: cosine of at least `similarity`, over at least `visits`. Else it has no score.
    key, kind: as in `Remembering`. After TraPO, whose trajectories are compared per database of labelled prompts.
    """

    similarity: float = 0.9
    visits: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.similarity <= 1 or self.visits < 1:
            raise UserError(f"reward 'pseudo_labels': similarity is {self.similarity}, visits {self.visits}, expected "
                            "above 0 up to 1, and 1 or more")

    def _score(self, memory: dict[str, Any], epoch: int | None, prompt: str, answers: Sequence[Hashable | None],
               label: set[Hashable | None] | None) -> list[float | None]:
        best = mode(answers)
        accepted = {best} if label is None else label
        right = [float(answer is not None and answer in accepted) for answer in answers]
        visits = add_visit(memory, epoch, prompt, [label is not None, sum(right) / len(right)])
        rates = [rate for _, _, rate in visits]
        if label is not None:
            return list(right)
        known = [[rate for _, _, rate in history] for history in memory.values() if history[0][1]]
        trusted = len(rates) >= self.visits and alike(rates, mean_trajectory(known)) >= self.similarity
        return list(right) if trusted else [None] * len(right)
