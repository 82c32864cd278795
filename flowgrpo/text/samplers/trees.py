"""Groups of completions with shared prefixes: parts of a method's `draws`, as in `groups`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowgrpo.text.samplers.groups import joined, ordered

if TYPE_CHECKING:
    from flowgrpo.text.samplers.decoding import Decoding
    from flowgrpo.text.samplers.language_model import CausalModel
    from flowgrpo.text.samplers.records import SampledCompletions, TokenizedPrompts


@dataclass(frozen=True)
class Tree:
    """Tree: after every `tokens` tokens each completion so far continues in `children` ways (SPO-tree, 2505.23564).

    children: of the first split, the second and so on. A group has as many samples as the tree has leaves, or a
    multiple of them from separate roots. One of the ways is the present completion; the others are drawn anew from its
    prefix. A completion that ends before a split is repeated in the group.
    """

    children: tuple[int, ...] = (2, 2)
    tokens: int = 32
    causal = True

    def __post_init__(self) -> None:
        if not self.children or min(self.children) < 1 or self.tokens < 1:
            raise ValueError(f"Tree: children are {list(self.children)} and tokens {self.tokens}, expected 1 or more, "
                             "and one split at least")

    @property
    def leaves(self) -> int:
        return math.prod(self.children)

    def __call__(self, policy: CausalModel, tokenized: TokenizedPrompts, decoding: Decoding,
                 generators: Sequence[torch.Generator], greedy: Tensor, group: int, micro_batch: int
                 ) -> list[SampledCompletions]:
        rows = torch.arange(0, len(generators), self.leaves)
        completions = joined([policy.sample(tokenized.rows(at), decoding, [generators[i] for i in at], greedy[at])
                              for at in rows.split(micro_batch)])
        for depth, count in enumerate(self.children):
            width = math.prod(self.children[depth + 1:])
            parents = torch.arange(len(rows)).repeat_interleave(count - 1)
            new = rows[parents] + width * (torch.arange(count - 1) + 1).repeat(len(rows))
            grown = [regrown(policy, tokenized.rows(new[at]), decoding, [generators[i] for i in new[at]],
                             ordered(completions, parents[at]), torch.full((len(at),), (depth + 1) * self.tokens))
                     for at in torch.arange(len(new)).split(micro_batch)]
            completions, rows = joined([completions, *grown]), torch.cat([rows, new])
        return [ordered(completions, rows.argsort())]


def regrown(policy: CausalModel, tokenized: TokenizedPrompts, decoding: Decoding, generators: Sequence[torch.Generator],
            completions: SampledCompletions, places: Tensor) -> SampledCompletions:
    """Return the completions, each kept up to its place and drawn anew from there.

    places: int64 [b], in tokens. A completion that ends before its place stays unchanged.
    """
    from flowgrpo.text.samplers.continuations import continued

    open_ = (completions.mask.sum(1) > places).nonzero().flatten()
    if not len(open_):
        return completions
    anew = continued(policy, tokenized.rows(open_), [completions.ids[i, :places[i]] for i in open_], decoding,
                     [generators[i] for i in open_])
    before = torch.arange(completions.ids.shape[1]) < places[open_, None]
    anew = replace(anew, logp=torch.where(before, completions.logp[open_], anew.logp))
    closed = (completions.mask.sum(1) <= places).nonzero().flatten()
    return ordered(joined([anew, ordered(completions, closed)]), torch.cat([open_, closed]).argsort())
