"""Targets of a language model's rollouts: record and replay of what the loss scores, and scores of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from flowgrpo import objectives
from flowgrpo.methods.method import Method
from flowgrpo.objectives.sequence_losses import GroupLoss
from flowgrpo.rollouts.loss_inputs import CompletionInputs, LossInputs
from flowgrpo.samplers.rollout import Part
from flowgrpo.text.credit import StepScores, text_steps
from flowgrpo.text.policies.masked_lm import SampledTrace
from flowgrpo.text.samplers.decoding import Unmasking
from flowgrpo.text.samplers.language_model import CausalModel, SampledCompletions, TokenizedPrompts
from flowgrpo.types import Completion, Completions, Scored, Segmented, Traces, unwrap


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


Replayed = Iterator[tuple[int, slice, Scored]]


class CompletionTokens:
    """Tokens of completions, by their log-probability; of an unmasking's trace in the state of each token's own step.

    progress: share of the run's epochs that are over, 0 in the first and 1 in the last one.
    """

    progress = 0.0

    def __init__(self, rollouts: Any):  # `completions.TextRollouts`
        self.policy, self.text, self.rollouts = rollouts.policy, rollouts.config.text, rollouts
        self.method: Method = rollouts.method

    @property
    def micro_batch(self) -> int:
        """Rows that go through the model at once, now."""
        return self.rollouts.geometry.micro_batch

    def record(self, groups: range, prompts: torch.Tensor, batches: Sequence[SampledCompletions]) -> Part:
        """Whole groups of completions as a part.
        Completions that were cut off without an end are left out of the loss, or lose the penalty, as `text.truncated`
        says."""
        ids, logp, mask, cut = (torch.cat([getattr(batch, name) for batch in batches]) for name in
                                ("ids", "logp", "mask", "cut"))
        measured = {"penalty": self.text.penalty * cut.float()} if self.text.truncated == "penalise" else {}
        old = Scored(logp.masked_fill(~mask, 0.0), mask)
        experts = self.method.generation.decoding.expert
        expert = torch.cat([unwrap(batch.expert) for batch in batches]) if experts else None
        taken = Completions(ids, prompts, old, expert=expert, left_out=cut if self.text.truncated == "mask" else None)
        if isinstance(batches[0], SampledTrace):
            taken = Traces(**vars(taken), steps=torch.cat([cast(SampledTrace, batch).steps for batch in batches]))
        return Part(groups, prompts, None, (taken,), (), measured=measured)

    def replay(self, part: Part, conditioning: TokenizedPrompts) -> Replayed:
        """Score a part's completions under the present weights: (0, its rows, scores), in micro-batches; of traces as
        many rows at once as have a micro-batch of states, one at least."""
        [taken], decoding, most = part.transitions, self.method.generation.decoding, self.micro_batch
        together, of_trace = most, isinstance(taken, Traces)
        if of_trace:
            states = int(cast(Unmasking, decoding).scorings(taken.steps, taken.ids.shape[1]).max()) + 1
            together = max(most // states, 1)
        for start in range(0, len(taken.ids), together):
            rows = slice(start, start + together)
            trace = (taken.steps[rows], most) if of_trace else ()
            yield 0, rows, self.policy.log_probs(conditioning, taken.prompts[rows], taken.ids[rows],
                                                 taken.old.mask[rows], decoding, *trace,
                                                 entropy=self.method.reads_entropy)

    def loss_inputs(self, part: Part, conditioning: TokenizedPrompts, reference: Sequence[Scored]) -> LossInputs:
        surrogate = self.method.loss.surrogate
        if not isinstance(surrogate, GroupLoss):
            given = cast(Completions, part.transitions[0]).expert
            expert = None if given is None else given.to(self.policy.device)
            return lambda batch, k, rows, new, old: objectives.surrogate_input(
                surrogate, new, old, expert if expert is None else expert[rows])
        return CompletionInputs(self.method, part, reference, self.policy.device,
                                lambda: self.replay(part, conditioning), self.progress)
