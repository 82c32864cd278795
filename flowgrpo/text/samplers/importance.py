"""Importance weights for completions sampled by another program than the trainer; and partial rollouts.

An engine with other kernels or another precision computes other log-probabilities for the same weights. So its samples
are not quite the policy's. They are weighted by the bounded ratio of the two.

Partial rollouts are groups of completions that are drawn a few tokens at a time, until enough of them are whole (APRIL,
2509.18521).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from flowgrpo.parts import AtLeast, OneOf, part
from flowgrpo.text.samplers.decoding import Decoding, completion_masks
from flowgrpo.text.samplers.language_model import CausalModel, SampledCompletions, TokenizedPrompts

HOW, LEVELS = ("tis", "mis", "none"), ("token", "sequence")


@part(jointly={"how level": f"one of {', '.join(HOW)} and one of {', '.join(LEVELS)}"})
class Mismatch:
    """Importance weight of every token, [B,L], from r = exp(trainer - engine).

    how: "tis", min(r, cap) (truncated importance sampling: Yao and others, Your Efficient RL Framework Secretly Brings
        You Off-Policy RL Training, 2025); "mis", r up to the cap and 0 above it (masked: Liu and others, When Speed
        Kills Stability, 2025); "none", 1.
    level: r of each token, or of its whole completion, the product over its tokens.
    """

    how: Annotated[str, OneOf(HOW)] = "tis"
    cap: Annotated[float, AtLeast(1, words="1 or more (infinity for none)")] = 2.0
    level: Annotated[str, OneOf(LEVELS)] = "token"

    def __call__(self, trainer: Tensor, engine: Tensor, mask: Tensor) -> Tensor:
        """Weights [B,L], without a gradient, of log-probabilities [B,L] at the same weights; 1 where mask is false."""
        excess = self._log_ratio(trainer, engine, mask)
        ratio = excess.clamp(max=math.log(self.cap)).exp()
        if self.how == "none":
            ratio = ratio.new_ones(ratio.shape)
        elif self.how == "mis":
            ratio = ratio.masked_fill(self.above(trainer, engine, mask), 0.0)
        return ratio.masked_fill(~mask, 1.0)

    def above(self, trainer: Tensor, engine: Tensor, mask: Tensor) -> Tensor:
        """The mask of r above the cap, bool [B,L]; false where mask is false."""
        return (self._log_ratio(trainer, engine, mask) > math.log(self.cap)) & mask

    def _log_ratio(self, trainer: Tensor, engine: Tensor, mask: Tensor) -> Tensor:
        apart = (trainer.detach() - engine.detach()).masked_fill(~mask, 0.0)
        return apart if self.level == "token" else apart.sum(1, keepdim=True).expand_as(apart)


@dataclass(frozen=True, eq=False)
class Begun:
    """Group of G completions of at most L tokens, some of which go on.

    seeds: int64 [G], of their generators.
    ids: int64 [G, L].
    logp: [G, L], of each token under the weights that drew it.
    versions: int64 [G, L], the number of those weights.
    lengths: int64 [G], tokens so far. ended: bool [G].

    All tensors are on the CPU.
    """

    seeds: Tensor
    ids: Tensor
    logp: Tensor
    versions: Tensor
    lengths: Tensor
    ended: Tensor

    @property
    def whole(self) -> bool:
        return bool(self.ended.all())

    @property
    def token_mask(self) -> Tensor:
        return torch.arange(self.ids.shape[1]) < self.lengths[:, None]


def begin(seeds: Sequence[int], most: int) -> Begun:
    """A group without tokens, whose completions have at most `most`."""
    ids = torch.zeros(len(seeds), most, dtype=torch.int64)
    none = torch.zeros(len(seeds), dtype=torch.int64)
    return Begun(torch.tensor(seeds), ids, torch.zeros(ids.shape), ids.clone(), none, none.bool())


def continue_groups(policy: CausalModel, tokenized: TokenizedPrompts, groups: Sequence[Begun], decoding: Decoding,
                    chunk: int, micro_batch: int, version: int) -> list[Begun]:
    """The groups with up to `chunk` more tokens of every completion that has not ended, at most `micro_batch` rows at
    once.
    tokenized: the prompt of each group. version: the number of the present weights. The tokens of a completion are
    those of one uninterrupted draw, if the weights stay the same."""
    rows = Begun(*map(torch.cat, zip(*(vars(group).values() for group in groups))))
    sizes, most, text = [len(group.ids) for group in groups], rows.ids.shape[1], policy.text
    of = torch.arange(len(groups)).repeat_interleave(torch.tensor(sizes))
    policy.text = text.model_copy(update={"max_tokens": min(chunk, text.max_tokens)})
    try:
        for at in (~rows.ended).nonzero()[:, 0].split(micro_batch):
            lengths = rows.lengths[at].tolist()
            prefixes = [rows.ids[row, :length] for row, length in zip(at, lengths)]
            generators = policy.generators(rows.seeds[at].tolist())
            for generator, length in zip(generators, lengths):
                torch.rand(length, generator=generator)  # the numbers of the tokens so far
            asked = tokenized.rows(of[at])
            begun = [torch.cat(both) for both in zip(asked.ids, prefixes)]
            more = policy.sample(replace(asked, ids=begun, begun=prefixes), decoding, generators,
                                 torch.zeros(len(at), dtype=torch.bool))
            for number, (row, start, drawn) in enumerate(zip(at.tolist(), lengths, more.mask.sum(1).tolist())):
                count = min(drawn, most - start)
                new = slice(start, start + count)
                rows.ids[row, new], rows.logp[row, new] = more.ids[number, :count], more.logp[number, :count]
                rows.versions[row, new], rows.lengths[row] = version, start + count
                rows.ended[row] = start + count == most or (count == drawn and not more.cut[number])
    finally:
        policy.text = text
    columns = ([piece.clone() for piece in column.split(sizes)] for column in vars(rows).values())
    return [Begun(*group) for group in zip(*columns)]


def complete_groups(policy: CausalModel, prompts: Sequence[str], groups: Sequence[Begun]) -> SampledCompletions:
    """Whole groups, each of its prompt, as one batch of completions, with the stored log-probabilities."""
    ids, logp, drawn = (torch.cat([getattr(group, name) for group in groups]) for name in ("ids", "logp", "token_mask"))
    mask, cut = completion_masks(ids, policy.ends)
    mask = mask & drawn
    of = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in range(len(group.ids))]
    return SampledCompletions(ids, logp.masked_fill(~mask, 0.0), mask, cut, policy.detokenize(ids, mask, of))
