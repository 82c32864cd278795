"""Rewards made of verdicts: votes of several verifiers, flawed right answers, rechecks, difficulty.

    reward:
      votes: {args: {rewards: [judge_a.py:a, judge_b.py:b, judge_c.py:c]}}
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowgrpo.data.prompts import USER_PROMPT
from flowgrpo.errors import UserError
from flowgrpo.escaped import one_line
from flowgrpo.rewards.combine import LIKE_ITS_PARTS, Combined
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.reward import Batch

# --- pure ------------------------------------------------------------------------------------------------------------


def votes(scores: Tensor) -> Tensor:
    """Return the verdict of voters that give probabilities of "right": 1, 0, or 0.5 at a tie. [B, R] -> [B].

    A voter votes for the likelier side. Its vote counts by its certainty |2 p - 1|, the self-consistency of a voter
    that is asked many times (RLCCF): a certain voter outvotes two unsure ones, and equally certain ones decide by
    plain majority. A voter without a score (NaN) does not vote; NaN if none does.
    """
    balance = (2 * scores - 1).nansum(1)
    balance = balance.masked_fill(balance.abs() < 1e-9, 0)  # a tie but for rounding
    return ((balance.sign() + 1) / 2).masked_fill(scores.isnan().all(1), torch.nan)


def flawed(scores: Tensor, right: float, sound: float) -> Tensor:
    """Return FAPO's reward of (answer, process): -1 for a wrong answer, 1 for a right one by a sound process, 0 for a
    right one by a flawed process. [B, 2] -> [B].

    A flawed sample is above the mean of a group that is mostly wrong, and below that of a group mostly right. NaN if
    the answer has no score; a process without one is sound.
    """
    answer, process = scores.unbind(1)
    value = torch.where(answer >= right, 1 - (process < sound).to(scores), -1.0)
    return value.masked_fill(answer.isnan(), torch.nan)


# --- for a recipe ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Votes(Combined):
    """Verdict of several verifiers that score from 0 to 1, each vote weighted by its certainty."""

    about = replace(LIKE_ITS_PARTS, range=(0, 1))

    def combined(self, scores: Tensor) -> Tensor:
        if (wrong := scores[(scores < 0) | (scores > 1)]).numel():
            raise UserError(f"reward 'votes': a voter scores {wrong[0].item():g}, expected from 0 to 1")
        return votes(scores)


@dataclass(frozen=True, eq=False)
class Flawed(Combined):
    """-1 for a wrong answer, 1 for a right one by a sound process, 0 for a right one by a flawed process (FAPO).

    rewards: the verifier of the answer, then the judge of the process. right, sound: scores from which on they are.
    """

    right: float = 1.0
    sound: float = 0.5
    about = replace(LIKE_ITS_PARTS, range=(-1, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(len(self.rewards) == 2, "rewards", "two rewards")

    def combined(self, scores: Tensor) -> Tensor:
        return flawed(scores, self.right, self.sound)


@dataclass(frozen=True, eq=False)
class Rechecked(Combined):
    """Verdict of a second verifier on some of the samples that the first one rejects; None for the others.

    rewards: the first verifier, then the second. share: of the rejected samples, drawn by a digest of prompt and
    sample. right: the score from which on either of them accepts. Together with the first verifier's own reward it
    estimates that one's rate of misses for `ForwardCorrected`; see there.
    """

    share: float = 0.1
    right: float = 1.0
    about = replace(LIKE_ITS_PARTS, range=(0, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(len(self.rewards) == 2, "rewards", "two rewards")
        self._require(0 < self.share <= 1, "share", "above 0, up to 1")

    def __call__(self, batch: Batch) -> list[float | None | Failed]:
        from flowgrpo.rewards.score import of_batch

        (_, first), (name, second) = self.made.items()
        [verdicts] = of_batch({"first": first}, batch)
        rows = [row for row, verdict in enumerate(verdicts) if not isinstance(verdict, Failed)
                and verdict < self.right and drawn(batch.samples[row], batch.prompts[row], self.share)]
        values: list[float | None | Failed] = [None] * len(batch)
        if rows:
            [found] = of_batch({name: second}, batch.rows(rows))
            for row, value in zip(rows, found):
                values[row] = value if isinstance(value, Failed) else None if value != value else float(
                    value >= self.right)
        return values


def drawn(output: Tensor | str, prompt: str, share: float) -> bool:
    """True for a share of all samples, always the same ones."""
    content = output.encode("utf-8", "surrogatepass") if isinstance(output, str) else output.cpu().numpy().tobytes()
    digest = hashlib.sha256(prompt.encode("utf-8", "surrogatepass") + b"\0" + content).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


@dataclass(frozen=True, eq=False)
class Scaled(Combined):
    """Reward times its prompt's difficulty, a number of 0 or more in the metadata; times 1 without it (RewardMap).

    key: of the metadata. It is of effect with an advantage that does not divide by the group's deviation, such as
    `{scale: batch}`.
    """

    key: str = "difficulty"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(len(self.rewards) == 1, "rewards", "one reward")

    def __call__(self, batch: Batch) -> list[float | None | Failed]:
        factors = [entry.get(self.key, 1) for entry in batch.metadata]
        for factor, prompt in zip(factors, batch.prompts):
            if type(factor) not in (int, float) or not 0 <= factor < 1e9:
                raise UserError(f"reward 'scaled': metadata.{self.key} is {one_line(repr(factor)[:80])}, expected a "
                                f"number of 0 or more (prompt: {one_line(prompt[:80])!r})")
        values = super().__call__(batch)
        return [value if value is None or isinstance(value, Failed) else value * factor
                for value, factor in zip(values, factors)]

    def combined(self, scores: Tensor) -> Tensor:
        return scores[:, 0]


@dataclass(frozen=True, eq=False)
class UserPrompt(Combined):
    """Score of a reward for the user's prompt in the metadata, in place of the rewritten prompt that was sampled from.

    key: of the metadata; a prompt without it is the user's.
    """

    key: str = USER_PROMPT

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(len(self.rewards) == 1, "rewards", "one reward")

    def __call__(self, batch: Batch) -> list[float | None | Failed]:
        users = [str(entry.get(self.key, prompt)) for prompt, entry in zip(batch.prompts, batch.metadata)]
        return super().__call__(replace(batch, prompts=users))

    def combined(self, scores: Tensor) -> Tensor:
        return scores[:, 0]
