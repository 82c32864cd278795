"""Credit of completions: scores of their steps, length-dependent shaping, and the reward of answers that came with
their prompts (ViSurf, 2510.10606).
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from torch import Tensor

from flowgrpo.advantages.group import group_relative, weighted_sum
from flowgrpo.advantages.shaping import Shaping
from flowgrpo.advantages.token_credit import TokenCredit, chain
from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError
from flowgrpo.parts import AtLeast, OneOf, part
from flowgrpo.text.samplers.language_model import CausalModel, TokenizedPrompts
from flowgrpo.types import Completion, Completions, Context, Segmented, unwrap


@part("shaping", target="texts", reads_answers=True,
      merges=lambda shaping: shaping.shaping is not None and shaping.shaping.merges)
class ExpertReward(Shaping):
    """Rewards of a group that holds the prompt's own answer (ViSurf, 2510.10606).

    without: names of rewards that an answer does not earn, such as one for a thinking part that it lacks: it has 0.
    smooth: an answer has the mean of the group's samples where one of them scores as high as it, so that its advantage
        is 0.
    shaping: another shaping, which is applied behind; None: none.
    """

    without: tuple[str, ...] = ()
    smooth: bool = True
    shaping: Shaping | None = None

    def require_config(self, config: Config, of_text: bool) -> None:
        """Raise UserError for a name that is no reward of the run."""
        for name in self.without:
            if name not in config.rewards:
                raise UserError(f"parts.shaping.without names {name!r}, which is no reward of the run: expected names "
                                f"among {', '.join(config.rewards)}")

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        known = unwrap(context)
        expert = unwrap(known.samples.expert).to(rewards.device)
        lost = torch.tensor([name in self.without for name in known.rewards.names], device=rewards.device)
        if lost.any():
            zero = torch.where(rewards.isnan(), rewards, torch.zeros_like(rewards))
            rewards = torch.where(expert[..., None] & lost, zero, rewards)
        if self.smooth:
            totals = weighted_sum(rewards, known.rewards.weights or [1.0] * rewards.shape[2])
            best = totals.masked_fill(expert | totals.isnan(), -torch.inf).amax(1, keepdim=True)  # of the samples
            mean = rewards.masked_fill(expert[..., None], torch.nan).nanmean(1, keepdim=True)
            rewards = torch.where((expert & (best >= totals))[..., None], mean, rewards)
        return rewards if self.shaping is None else self.shaping(rewards, context)


@part("shaping", target="texts", teaches=True, jointly={"top least alpha": "0 to 1 each"})
class LengthSwitch(Shaping):
    """Right samples earn less the longer they are, in groups with a high share of right ones; other groups are
    unchanged (GRPO-lambda, 2505.18086).

    Right is a sample whose first reward reaches `right`. Groups are ranked by their share of right ones over the whole
    batch. The length term `penalise_length` applies to the upper `top` of them, rounded up, ties by position, and only
    at a share of at least `least`. top: 0.2, of the published runs as we know them; with top 1, `least` decides; with 0
    no group has it. Wrong samples and all other rewards are unchanged. The length is the method's own signal: groups
    that are all right learn by it.
    """

    top: Annotated[float, AtLeast(0, to=1)] = 0.2
    least: Annotated[float, AtLeast(0, to=1)] = 0.0
    alpha: Annotated[float, AtLeast(0, to=1)] = 0.2
    right: float = 1.0

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        assert context is not None and context.samples.lengths is not None, "LengthSwitch needs a context with lengths"
        right = rewards[..., 0] >= self.right
        # Groups with the length term, bool [P]: of the highest shares of right samples.
        share = right.sum(1) / (~rewards[..., 0].isnan()).sum(1).clamp(min=1)
        count = math.ceil(self.top * len(share) - 1e-9)
        on = torch.zeros_like(share, dtype=torch.bool)
        on[share.argsort(descending=True, stable=True)[:count]] = True
        on &= share >= self.least
        shorter = penalise_length(rewards[..., 0], right, context.samples.lengths, self.alpha)
        first = torch.where(on[:, None] & right, shorter, rewards[..., 0])
        return torch.cat([first[..., None], rewards[..., 1:]], dim=2)


def penalise_length(rewards: Tensor, right: Tensor, lengths: Tensor, alpha: float) -> Tensor:
    """Rewards [P, G] times 1 - alpha sigmoid(z): [P, G].
    z is the length [P, G] less the mean length of the group's right samples (bool [P, G]), over their deviation (ddof
    0, eps 1e-6). This is the penalty of "Training Language Models to Reason Efficiently" (2502.04463); as the length
    term of GRPO-lambda it is a reconstruction."""
    long = lengths.to(rewards)
    count = right.sum(1, keepdim=True).clamp(min=1)
    mean = (long * right).sum(1, keepdim=True) / count
    spread = ((long - mean).square() * right).sum(1, keepdim=True).div(count).sqrt()
    return rewards * (1 - alpha * ((long - mean) / (spread + 1e-6)).sigmoid())


@part("shaping", target="texts", teaches=True)
class ExitDecay(Shaping):
    """Exponential decay of a group's right samples: the first keeps its reward, and each further one has half of the
    one before (S-GRPO, 2505.07686, whose group is one thought left at ever later places: `EarlyExits`).

    Right is a sample whose first reward reaches `right`; of that reward the N-th right one keeps 1 / 2^(N - 1). Wrong
    samples and all other rewards are unchanged. The place is the method's own signal: groups that are all right learn
    by it.
    """

    right: float = 1.0

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        right = rewards[..., 0] >= self.right
        before = (right.long().cumsum(1) - right.long()).to(rewards)
        first = torch.where(right, rewards[..., 0] * 0.5 ** before, rewards[..., 0])
        return torch.cat([first[..., None], rewards[..., 1:]], dim=2)


@part("spread", target="texts", causal=True, teaches=True)
class StepScores(TokenCredit):
    """Advantage of a token with the credit of its step: `outcome` times the sample's, plus `weight` times that credit.

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

    kind: Annotated[str, OneOf(("group", "blame", "progress", "potential", "last"))] = "group"
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

    def __post_init__(self) -> None:
        if self.gain < 0 or self.gain and self.kind != "group":
            raise ValueError(f"StepScores: gain is {self.gain} with kind {self.kind!r}, expected 0 or more, and kind "
                             "'group'")
        if self.weight < 0 or self.outcome < 0 or self.votes < 1 or not self.ends:
            raise ValueError(f"StepScores: weight is {self.weight}, outcome {self.outcome}, votes {self.votes} and "
                             f"ends {self.ends!r}, expected 0 or more, 0 or more, 1 or more, and a text")

    def majority_vote(self, scores: Tensor) -> Tensor:
        """The score of each step, [n], from those of its votes [n, votes]; NaN if none applies."""
        if self.votes == 1:
            return scores[:, 0]
        share = torch.where(scores.isnan(), torch.nan, (scores >= self.right).to(scores)).nanmean(1)
        return torch.where(share.isnan(), share, (share > 0.5).to(share))

    def __call__(self, taken: Completions, advantages: Tensor, totals: Tensor) -> Tensor:
        assert isinstance(taken, Segmented), "its rollout scores the steps"
        segments, scores, mask = taken.segments, taken.values, taken.old.mask.cpu()
        if self.thoughts:
            segments, scores = merge_steps(segments, scores, self.right)
        credit = self._credit(segments, scores, totals).nan_to_num(0)
        weight = self.weight * (1 - totals.nanmean(1).clamp(0, 1).nan_to_num(0) if self.easing else
                                torch.ones(len(totals)))
        weight = weight.repeat_interleave(totals.shape[1])[:, None].to(credit)
        return (self.outcome * advantages[:, None].to(credit) + weight * credit) * mask

    def _credit(self, segments: Tensor, scores: Tensor, totals: Tensor) -> Tensor:
        """The credit of every token's step, [m, L]."""
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
    """Scores [m, S] of steps, each with `gain` times its change from the step before; a missing step before (NaN) adds
    nothing."""
    change = scores[:, 1:] - scores[:, :-1]
    return torch.cat([scores[:, :1], scores[:, 1:] + gain * change.nan_to_num(0)], 1) if gain else scores


def score_steps(policy: CausalModel, tokenized: TokenizedPrompts, taken: Completions, spread: StepScores,
                judge: Callable[..., Tensor]) -> Segmented:
    """The completions in steps, with the score of each.
    judge: judge(texts, votes, prompts, None, names) returns the total rewards [., votes] of texts of the prompts."""
    def text(ids: Sequence[int]) -> str:
        return policy.tokenizer.decode(ids, skip_special_tokens=True)

    segments, texts, of = torch.zeros_like(taken.ids), [], []
    tags = policy.opened([tokenized.prompts[i] for i in taken.prompts])
    for row, (ids, mask) in enumerate(zip(taken.ids, taken.old.mask.cpu())):
        count = int((mask * torch.arange(1, len(mask) + 1)).max())  # to the last one that counts
        start = 0
        for number, end in enumerate(text_steps(ids[:count].tolist(), spread.ends, text)):
            segments[row, start:] = number
            shown = ids[0 if spread.whole else start:end].tolist()
            opened = "" if start and not spread.whole else tags[row]
            texts += [Completion(text(shown), len(shown), opened=opened)] * spread.votes
            of.append((row, number))
            start = end
    scores = torch.full((len(taken.ids), int(segments.max()) + 1), torch.nan)
    if of:
        rows, numbers = torch.tensor(of).unbind(1)
        prompts = taken.prompts[rows].repeat_interleave(spread.votes)
        scores[rows, numbers] = spread.majority_vote(judge(texts, spread.votes, prompts, None,
                                                           spread.rewards)).to(scores)
    return Segmented(**vars(taken), segments=segments, values=scores)


def text_steps(ids: Sequence[int], ends: str, text: Callable[[Sequence[int]], str]) -> list[int]:
    """The place behind each step of a completion's tokens [n]. text: of tokens.
    A step ends with the token that completes `ends`; the last one with the completion."""
    places, start = [], 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or ends in text(ids[start:place]):
            places.append(place)
            start = place
    return places


def merge_steps(segments: Tensor, scores: Tensor, right: float) -> tuple[Tensor, Tensor]:
    """The segments [m, L] and scores [m, S] with neighbouring steps merged that are right, or wrong, alike.
    A merged step has the mean of its scores. Steps without a score (NaN) are wrong."""
    known = torch.arange(scores.shape[1]) <= segments.amax(1, keepdim=True)
    good = scores >= right
    number = torch.nn.functional.pad((good[:, 1:] != good[:, :-1]).long().cumsum(1), (1, 0))
    count = torch.zeros_like(scores).scatter_add(1, number, (known & ~scores.isnan()).to(scores))
    total = torch.zeros_like(scores).scatter_add(1, number, scores.masked_fill(~known, 0).nan_to_num(0))
    return number.gather(1, segments), torch.where(count > 0, total / count.clamp(min=1), torch.nan)
