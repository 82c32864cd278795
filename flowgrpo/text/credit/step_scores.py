"""Process scores of texts: a completion's steps are scored one by one, and their tokens get what they earned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo.advantages.group import group_relative
from flowgrpo.advantages.segments import chain
from flowgrpo.advantages.token_credit import TokenCredit
from flowgrpo.types import Completions, Segmented

KINDS = ("group", "blame", "progress", "potential", "last")


@dataclass(frozen=True)
class StepScores(TokenCredit):
    """Advantage of a token: `outcome` times the sample's, plus `weight` times the credit of the token's step.

    A step ends with a token whose text completes `ends`. The rewards `rewards` score it, as any text.
    kind: the credit of a step.
        "group": its score less the mean, over the deviation, of the group's steps of that number (Step-GRPO).
        "blame": -1 if its score is below `right`, else 0 (CAPO).
        "progress": the score behind it less that before it; the first begins from the group's mean reward, the last
            ends at the sample's reward (MRT, 2503.07572; IRCoCo, 2401.16637). A sample's sum to its reward less that
            mean.
        "potential": as progress, from 0 before the first step to 0 behind the last, so that a sample's sum to 0 and the
        best policy stays (potential-based shaping; GRPO-R, with the reward `reasoning_depth`).
    whole: a step is scored with all text before it, as a process reward model reads it, or alone.
    votes: times that each step is scored; with several a step is right, 1, if most of them reach `right`, else 0.
    thoughts: neighbouring steps that are all right, or all wrong, are merged, and have their mean score (TP-GRPO).
    gain: with "group", factor of the change of the score from the step before, which is added to it (SCoRe's alpha,
        for the steps of `SecondAttempt`).
    easing: the weight is multiplied by 1 less the group's mean reward, within 0 to 1: steps count less the more of a
        group is right (TP-GRPO's adaptive weight, in a form of ours).
    rewards: names of the run's rewards; empty: all. One of weight 0 counts with weight 1.
    """

    kind: str = "group"
    weight: float = 1.0
    outcome: float = 1.0
    ends: str = "\n"
    whole: bool = True
    right: float = 0.5
    votes: int = 1
    thoughts: bool = False
    gain: float = 0.0
    easing: bool = False
    rewards: tuple[str, ...] = ()
    causal = True
    reads_target = "tokens"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rewards", tuple(self.rewards))  # a recipe gives a list
        if self.kind not in KINDS:
            raise ValueError(f"StepScores: kind is {self.kind!r}, expected one of {', '.join(KINDS)}")
        if self.gain < 0 or self.gain and self.kind != "group":
            raise ValueError(f"StepScores: gain is {self.gain} with kind {self.kind!r}, expected 0 or more, and kind "
                             "'group'")
        if self.weight < 0 or self.outcome < 0 or self.votes < 1 or not self.ends:
            raise ValueError(f"StepScores: weight is {self.weight}, outcome {self.outcome}, votes {self.votes} and "
                             f"ends {self.ends!r}, expected 0 or more, 0 or more, 1 or more, and a text")

    def voted(self, scores: Tensor) -> Tensor:
        """Return the score of each step, [n], from those of its votes [n, votes]; NaN if none applies."""
        if self.votes == 1:
            return scores[:, 0]
        share = torch.where(scores.isnan(), torch.nan, (scores >= self.right).to(scores)).nanmean(1)
        return torch.where(share.isnan(), share, (share > 0.5).to(share))

    def __call__(self, taken: Completions, advantages: Tensor, totals: Tensor) -> Tensor:
        assert isinstance(taken, Segmented), "its rollout scores the steps"
        segments, scores, mask = taken.segments, taken.values, taken.old.mask.cpu()
        if self.thoughts:
            segments, scores = merged_steps(segments, scores, self.right)
        credit = self._credit(segments, scores, totals).nan_to_num(0)
        weight = self.weight * (1 - totals.nanmean(1).clamp(0, 1).nan_to_num(0) if self.easing else
                                torch.ones(len(totals)))
        weight = weight.repeat_interleave(totals.shape[1])[:, None].to(credit)
        return (self.outcome * advantages[:, None].to(credit) + weight * credit) * mask

    def _credit(self, segments: Tensor, scores: Tensor, totals: Tensor) -> Tensor:
        """Return the credit of every token's step, [m, L]."""
        if self.kind in ("progress", "potential"):
            outcome = totals if self.kind == "progress" else torch.zeros_like(totals)
            first = outcome.nanmean(1, keepdim=True).expand_as(totals).reshape(-1, 1).to(scores)
            # The last step's own score gives way to the sample's reward, or to 0, which is what comes behind it.
            behind = torch.arange(1, scores.shape[1]) <= segments.amax(1, keepdim=True)
            return chain(torch.cat([first, scores[:, :-1].masked_fill(~behind, torch.nan)], 1), segments,
                         outcome.flatten())
        if self.kind == "blame":
            return -(scores < self.right).to(scores).gather(1, segments)
        if self.kind == "last":
            final = scores.gather(1, segments.amax(1, keepdim=True)).view(totals.shape)
            return group_relative(final, "group").view(-1, 1).expand_as(segments)
        groups = with_gains(scores, self.gain).unflatten(0, totals.shape).transpose(1, 2)  # [n, S, G]
        relative = group_relative(groups.flatten(0, 1), "group").view(groups.shape)
        return relative.transpose(1, 2).flatten(0, 1).gather(1, segments)


def with_gains(scores: Tensor, gain: float) -> Tensor:
    """Return scores [m, S] of steps, each with `gain` times its change from the step before; a missing step before
    (NaN) adds nothing."""
    change = scores[:, 1:] - scores[:, :-1]
    return torch.cat([scores[:, :1], scores[:, 1:] + gain * change.nan_to_num(0)], 1) if gain else scores


def text_steps(ids: Sequence[int], ends: str, text: Callable[[Sequence[int]], str]) -> list[int]:
    """Return the place behind each step of a completion's tokens [n]. text: of tokens.

    A step ends with the token that completes `ends`; the last one with the completion.
    """
    places, start = [], 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or ends in text(ids[start:place]):
            places.append(place)
            start = place
    return places


def merged_steps(segments: Tensor, scores: Tensor, right: float) -> tuple[Tensor, Tensor]:
    """Return the segments [m, L] and scores [m, S] with neighbouring steps merged that are right, or wrong, alike.

    A merged step has the mean of its scores. Steps without a score (NaN) are wrong.
    """
    known = torch.arange(scores.shape[1]) <= segments.amax(1, keepdim=True)
    good = scores >= right
    number = torch.nn.functional.pad((good[:, 1:] != good[:, :-1]).long().cumsum(1), (1, 0))
    count = torch.zeros_like(scores).scatter_add(1, number, (known & ~scores.isnan()).to(scores))
    total = torch.zeros_like(scores).scatter_add(1, number, scores.masked_fill(~known, 0).nan_to_num(0))
    return number.gather(1, segments), torch.where(count > 0, total / count.clamp(min=1), torch.nan)
