"""Continuations of partial completions, and Monte-Carlo values of the states there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from flowgrpo.errors import UserError
from flowgrpo.samplers.rollout import Seed
from flowgrpo.text.samplers.decoding import Decoding, decided, divided
from flowgrpo.text.samplers.language_model import CausalModel
from flowgrpo.text.samplers.records import SampledCompletions, TokenizedPrompts
from flowgrpo.types import Completions, Segmented


def continued(policy: CausalModel, tokenized: TokenizedPrompts, prefixes: Sequence[Tensor], decoding: Decoding,
              generators: Sequence[torch.Generator]) -> SampledCompletions:
    """Return one completion per row that begins with its prefix: B whole completions of at most `text.max_tokens`
    tokens.

    A prefix is int64, shorter than `text.max_tokens`, without an end. At its tokens logp is 0 and mask is true.
    Raises UserError for prompts with images.
    """
    if type(tokenized) is not TokenizedPrompts:
        raise UserError("the method continues completions from the middle, for which prompts with images are not "
                        "made: use another method")
    begun = [torch.cat(both) for both in zip(tokenized.ids, prefixes)]
    sampled = torch.zeros(len(begun), dtype=torch.bool)
    rests = policy.sample(replace(tokenized, ids=begun, begun=list(prefixes)), decoding, generators, sampled)
    most = policy.text.max_tokens
    behind = [(prefix, torch.zeros(len(prefix))) for prefix in prefixes]
    whole = [(torch.cat([first, rest])[:most], torch.cat([none, logp])[:most])
             for (first, none), rest, logp in zip(behind, rests.ids, rests.logp)]
    ids, logp = (torch.stack([pad(row, (0, most - len(row))) for row in column]) for column in zip(*whole))
    mask, cut = decided(ids, policy.ends)
    return SampledCompletions(ids, logp.masked_fill(~mask, 0.0), mask, cut, policy.written(ids, mask))


@torch.no_grad()
def alternatives(policy: CausalModel, tokenized: TokenizedPrompts, ids: Tensor, mask: Tensor, decoding: Decoding
                 ) -> tuple[Tensor, Tensor, Tensor]:
    """Return the most likely other token at each place of completions [B,L], its log-probability, and the largest one.

    All are [B,L]. The largest log-probability may be that of the other token. Values are -inf where mask is false or
    nothing else could be drawn.
    Raises UserError for a model whose logits are not those of its head alone.
    """
    if not policy.head_alone(tokenized):
        raise UserError(f"{type(policy.model).__name__} does more to its logits than its head: use a method that does "
                        "not look for other tokens")
    states, head = policy.states_before(tokenized, ids.to(policy.device)), policy.model.get_output_embeddings()
    tokens, logp, likeliest = torch.zeros_like(ids), *(torch.full(ids.shape, -torch.inf) for _ in range(2))
    heat = decoding.temperatures(ids)
    for row in range(len(ids)):  # row by row: the vocabulary may be large
        counted = mask[row]
        logits = head(states[row, :ids.shape[1]][counted.to(states.device)])
        log_probs = decoding(divided(logits, None if heat is None else heat[row, counted])).cpu()
        likeliest[row, counted] = log_probs.amax(1)
        best = log_probs.scatter(1, ids[row, counted][:, None], -torch.inf).max(1)
        logp[row, counted], tokens[row, counted] = best.values, best.indices
    return tokens, logp, likeliest


def segmented(policy: CausalModel, tokenized: TokenizedPrompts, taken: Completions, segments: Tensor,
              starts: Sequence[tuple[int, int, int]], samples: int, decoding: Decoding, seed: Seed, group: int,
              micro_batch: int, judge: Callable[[list[str], int, Tensor], Tensor]) -> Segmented:
    """Return the completions, whole groups, with the values of the states before their segments.

    A value is the mean reward of `samples` continuations from each of `starts`, (row, segment, place). It is NaN for a
    row's first segment, and where no continuation has a reward.
    seed: seed(prompt, sample); every continuation has a separate one, independent of the other samples.
    judge: judge(texts, n, prompts) returns the total rewards [., n] of texts of the prompts, n for each state.
    """
    values = torch.full((len(taken.ids), int(segments.max()) + 1), torch.nan)
    length = taken.ids.shape[1]
    rows = [(row, place, number) for row, _, place in starts for number in range(samples)]
    texts: list[str] = []
    for at in range(0, len(rows), micro_batch):
        batch = rows[at:at + micro_batch]
        prompts = taken.prompts[[row for row, _, _ in batch]]
        generators = policy.generators(seed(int(p), group + ((row % group) * length + place) * samples + number)
                                       for p, (row, place, number) in zip(prompts, batch))
        prefixes = [taken.ids[row, :place] for row, place, _ in batch]
        texts += continued(policy, tokenized.rows(prompts), prefixes, decoding, generators).texts
    if starts:
        row, segment, _ = torch.tensor(list(starts)).unbind(1)
        totals = judge(texts, samples, taken.prompts[row].repeat_interleave(samples))
        values[row, segment] = totals.nanmean(1).to(values)
    return Segmented(**vars(taken), segments=segments, values=values)
