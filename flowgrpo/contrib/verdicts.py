"""Rewards made of verdicts of other rewards: `ternary`, `checklist`, `corrected`, `progress` (SRPO), `votes` of several
verifiers, `flawed` right answers, `rechecked` ones and difficulty.

reward:
  votes: {args: {rewards: [judge_a.py:a, judge_b.py:b, judge_c.py:c]}}
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowgrpo.data.prompts import USER_PROMPT
from flowgrpo.errors import UserError
from flowgrpo.escaped import one_line
from flowgrpo.rewards.about import built_in
from flowgrpo.rewards.combine import LIKE_ITS_PARTS, Combined, where_any
from flowgrpo.rewards.failures import Failed, numbers
from flowgrpo.rewards.reward import Batch
from flowgrpo.rewards.score import of_batch


@dataclass(frozen=True, eq=False)
class OfOne(Combined):
    """Score made of one reward's: base class, whose score is that one."""

    count = 1

    def combine(self, scores: Tensor) -> Tensor:
        return scores[:, 0]


@built_in("ternary", eq=False)
class Ternary(OfOne):
    """1 if a reward reaches `right`, -1 up to `wrong`, else 0, also for None.

    Abstaining costs less than being wrong (TruthRL).
    """

    right: float = 1.0
    wrong: float = 0.0
    about = replace(LIKE_ITS_PARTS, range=(-1, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.wrong < self.right, "wrong", f"less than right, which is {self.right!r}")

    def combine(self, scores: Tensor) -> Tensor:
        score = scores[:, 0]
        return (score >= self.right).to(score) - (score <= self.wrong).to(score)


@built_in("checklist", "combine several", eq=False)
class Checklist(Combined):
    """Share of several rewards that reach their thresholds (1 for each by default), among those that apply.

    After ACE-RL.
    """

    thresholds: Sequence[float] | None = None
    about = replace(LIKE_ITS_PARTS, range=(0, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.thresholds is None or len(self.thresholds) == len(self.rewards), "thresholds",
                      f"{len(self.rewards)}, one per reward")

    def combine(self, scores: Tensor) -> Tensor:
        thresholds = [1.0] * scores.shape[1] if self.thresholds is None else self.thresholds
        met = (scores >= scores.new_tensor(thresholds)).sum(1)
        return where_any(scores, met / (~scores.isnan()).sum(1).clamp(min=1).to(scores))


@built_in("corrected", eq=False)
class Corrected(OfOne):
    """Verdict, 0 or 1, of a verifier with known error rates, corrected to be unbiased.

    (r - fp) / (1 - fp - fn), whose mean over the errors is the true verdict r (backward correction, "RL with Verifiable
    yet Noisy Rewards under Imperfect Verifiers").
    """

    false_positive: float = 0.0
    false_negative: float = 0.0
    smooth = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("false_positive", "false_negative"):
            self._require(0 <= getattr(self, name) < 1, name, "a rate from 0 to below 1")
        self._require(self.false_positive + self.false_negative < 1, "false_positive",
                      f"less than 1 - false_negative, {1 - self.false_negative:g}: such a verdict says nothing")

    def combine(self, scores: Tensor) -> Tensor:
        return (scores[:, 0] - self.false_positive) / (1 - self.false_positive - self.false_negative)


def progress(success: Tensor, apart: Tensor, most: float) -> Tensor:
    """1 for successes, and for failures most * sigmoid(-z), z the distance to the nearest success, standardised over
    the group's failures; 0 without a success: [G]. success: bool [G]. apart: distances between samples [G, G]."""
    values = success.to(apart)
    if not success.any() or success.all():
        return values
    nearest = apart[~success][:, success].amin(1)
    z = (nearest - nearest.mean()) / (nearest.std(correction=0) + 1e-8)
    values[~success] = most * (-z).sigmoid()
    return values


@built_in("progress", eq=False)
class Progress(OfOne):
    """1 for a success, and for a failure its nearness to the successes of its group, below 1 (SRPO).

    rewards: one verdict, with `right`, the score from which on it is a success. features: of images as in
    `diversity`; texts are compared by their words, 1 less the Jaccard similarity. most: bound of a failure's reward.
    After SRPO, whose distance is one to the centre of a cluster of successes; here it is that to the nearest success,
    standardised within the group. A group without a success falls back to 0 for all.
    """

    right: float = 1.0
    most: float = 0.8
    features: Any = "pixels"
    unit = "group"
    about = replace(LIKE_ITS_PARTS, modality="image/text", range=(0, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.most < 1, "most", "above 0 and below 1")

    def __call__(self, batch: Batch) -> list[float | None | Failed]:
        [column] = self.columns(batch)
        verdicts = torch.tensor(numbers(column), dtype=torch.float64)
        values: list[float | None | Failed] = []
        for start in range(0, len(batch), batch.group):
            at = slice(start, start + batch.group)
            found = progress(verdicts[at] >= self.right, self._apart(batch.samples[at]), self.most).tolist()
            values += [answer if isinstance(answer, Failed) else None if math.isnan(answer) else value
                       for answer, value in zip(column[at], found)]
        return values

    def _apart(self, outputs: Tensor | list[str]) -> Tensor:
        """Distances between the samples of a group, [G, G]."""
        if isinstance(outputs, Tensor):
            from flowgrpo.rewards.guards import extractor

            features = torch.as_tensor(extractor(self.features)(outputs)).double()
            return (features[:, None] - features[None]).norm(dim=-1)
        from flowgrpo.text.rewards.embeddings import likeness

        words: list[set[tuple[str, ...]]] = [{(word,) for word in text.casefold().split()} for text in outputs]
        return torch.tensor([[1 - likeness(one, other) for other in words] for one in words], dtype=torch.float64)


@built_in("votes", "ensemble majority", eq=False)
class Votes(Combined):
    """Verdict of several verifiers that score from 0 to 1, each vote weighted by its certainty.

    It is 1, 0, or 0.5 at a tie. The certainty |2 p - 1| is the self-consistency of a voter that is asked many times
    (RLCCF): a certain voter outvotes two unsure ones. A voter without a score does not vote.
    """

    about = replace(LIKE_ITS_PARTS, range=(0, 1))

    def combine(self, scores: Tensor) -> Tensor:
        if (wrong := scores[(scores < 0) | (scores > 1)]).numel():
            raise UserError(f"reward 'votes': a voter scores {wrong[0].item():g}, expected from 0 to 1")
        balance = (2 * scores - 1).nansum(1)
        balance = balance.masked_fill(balance.abs() < 1e-9, 0)  # a tie but for rounding
        return where_any(scores, (balance.sign() + 1) / 2)


@built_in("flawed", eq=False)
class Flawed(Combined):
    """-1 for a wrong answer, 1 for a right one by a sound process, 0 for a right one by a flawed process (FAPO).

    rewards: the verifier of the answer, then the judge of the process; a process without a score is sound. right,
    sound: scores from which on they are.
    """

    right: float = 1.0
    sound: float = 0.5
    count = 2
    about = replace(LIKE_ITS_PARTS, range=(-1, 1))

    def combine(self, scores: Tensor) -> Tensor:
        answer, process = scores.unbind(1)
        value = torch.where(answer >= self.right, 1 - (process < self.sound).to(scores), -1.0)
        return value.masked_fill(answer.isnan(), torch.nan)


@built_in("rechecked", eq=False)
class Rechecked(Combined):
    """Verdict of a second verifier on some of the samples that the first one rejects; None for the others.

    rewards: the first verifier, then the second. share: of the rejected samples, drawn by a digest of prompt and
    sample. right: the score from which on either of them accepts. Together with the first verifier's own reward it
    estimates that one's rate of misses for `ForwardCorrected`; see there.
    """

    share: float = 0.1
    right: float = 1.0
    count = 2
    about = replace(LIKE_ITS_PARTS, range=(0, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.share <= 1, "share", "above 0, up to 1")

    def __call__(self, batch: Batch) -> list[float | None | Failed]:
        (_, first), (name, second) = self.made.items()
        [verdicts] = of_batch({"first": first}, batch)
        rows = [row for row, verdict in enumerate(verdicts) if not isinstance(verdict, Failed)
                and verdict < self.right and is_sampled(batch.samples[row], batch.prompts[row], self.share)]
        values: list[float | None | Failed] = [None] * len(batch)
        if rows:
            [found] = of_batch({name: second}, batch.rows(rows))
            for row, value in zip(rows, found):
                values[row] = value if isinstance(value, Failed) else None if value != value else float(
                    value >= self.right)
        return values


def is_sampled(output: Tensor | str, prompt: str, share: float) -> bool:
    """True for a share of all samples, always the same ones."""
    content = output.encode("utf-8", "surrogatepass") if isinstance(output, str) else output.cpu().numpy().tobytes()
    digest = hashlib.sha256(prompt.encode("utf-8", "surrogatepass") + b"\0" + content).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


@built_in("scaled", eq=False)
class Scaled(OfOne):
    """Reward times its prompt's difficulty, a number of 0 or more in the metadata; times 1 without it (RewardMap).

    key: of the metadata. It is of effect with an advantage that does not divide by the group's deviation, such as
    `{scale: batch}`.
    """

    key: str = "difficulty"

    def __call__(self, batch: Batch) -> list[float | None | Failed]:
        factors = [entry.get(self.key, 1) for entry in batch.metadata]
        for factor, prompt in zip(factors, batch.prompts):
            if type(factor) not in (int, float) or not 0 <= factor < 1e9:
                raise UserError(f"reward 'scaled': metadata.{self.key} is {one_line(repr(factor)[:80])}, expected a "
                                f"number of 0 or more (prompt: {one_line(prompt[:80])!r})")
        values = super().__call__(batch)
        return [value if value is None or isinstance(value, Failed) else value * factor
                for value, factor in zip(values, factors)]


@built_in("user_prompt", eq=False)
class UserPrompt(OfOne):
    """Score of a reward for the user's prompt in the metadata, in place of the rewritten prompt that was sampled from.

    key: of the metadata; a prompt without it is the user's.
    """

    key: str = USER_PROMPT

    def __call__(self, batch: Batch) -> list[float | None | Failed]:
        users = [str(entry.get(self.key, prompt)) for prompt, entry in zip(batch.prompts, batch.metadata)]
        return super().__call__(replace(batch, prompts=users))
