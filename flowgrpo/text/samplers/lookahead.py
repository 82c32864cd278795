"""LATR: branch completions at uncertain tokens and keep the branches that diverge (2510.24302); a part of `draws`."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from flowgrpo.parts import AtLeast, part
from flowgrpo.text.samplers.decoding import Decoding, Generators
from flowgrpo.text.samplers.groups import alternatives, concatenate, continue_prefixes, reorder, sample_rows
from flowgrpo.text.samplers.language_model import CausalModel, SampledCompletions, TokenizedPrompts


@part("draws", causal=True, leaves=1, jointly={"likely gap apart share ahead": "0 to 1 each, and 1 or more"})
class BranchingLookahead:
    """Group grown from one completion: a branch takes a token nearly as likely as the one drawn, and stays if its next
    tokens differ enough (LATR, 2510.24302).

    A branch is tried where the most likely other token has a probability above `likely` and at most `gap` below the
    largest. It stays if the next `ahead` tokens, the other token included, differ from the ones it left by an edit
    distance of at least `apart` of their number. Branches branch again behind their place, the earliest first. The
    `share` of a group is grown this way; the rest is drawn in parallel. A branch's first token has the probability that
    the model gave it. The numbers and the order are a reconstruction.
    """

    likely: Annotated[float, AtLeast(0, to=1)] = 0.25
    gap: Annotated[float, AtLeast(0, to=1)] = 0.15
    ahead: Annotated[int, AtLeast(1)] = 20
    apart: Annotated[float, AtLeast(0, to=1)] = 0.4
    share: Annotated[float, AtLeast(0, to=1)] = 1.0

    def __call__(self, policy: CausalModel, tokenized: TokenizedPrompts, decoding: Decoding, generators: Generators,
                 greedy: Tensor, group: int, micro_batch: int) -> list[SampledCompletions]:
        def sample(rows: Sequence[int]) -> list[SampledCompletions]:
            return sample_rows(policy, tokenized, decoding, generators, greedy, torch.tensor(rows), micro_batch)

        # The first completion of each group is sampled as it comes; its uncertain tokens are where others can branch.
        rows, most = list(range(0, len(generators), group)), max(round(self.share * group), 1)
        completions = concatenate(sample(rows))
        new = self.branches(policy, tokenized.rows(torch.tensor(rows)), completions, decoding, [0] * len(rows), 0)
        waiting, grown = dict(zip(rows, map(deque, new))), dict.fromkeys(rows, 1)
        # Try waiting branches of all groups together, until a group has its share of them.
        while asking := [row for row in grown if waiting[row] and grown[row] < most][:micro_batch]:
            tries = [waiting[row].popleft() for row in asking]
            numbers = torch.tensor([row + grown[row] for row in asking])
            tried = complete_branches(policy, tokenized.rows(numbers), completions, decoding,
                                      [generators[i] for i in numbers], tries)
            for number, (row, branch) in enumerate(zip(asking, tries)):
                # A branch whose next tokens are nearly its parent's would only repeat it.
                window = slice(branch.place, branch.place + self.ahead)
                one, other = (samples.ids[at, window][samples.mask[at, window]].tolist()
                              for samples, at in ((completions, branch.parent), (tried, number)))
                if edit_distance(one, other) < self.apart * max(len(one), len(other)):
                    continue
                at = torch.tensor([number])
                [more] = self.branches(policy, tokenized.rows(numbers[at]), reorder(tried, at), decoding,
                                       [branch.place + 1], len(rows))
                completions, rows = concatenate([completions, reorder(tried, at)]), [*rows, int(numbers[number])]
                grown[row] += 1
                waiting[row] += more
        # Groups with too few branches are filled with samples of their own.
        missing = [row + number for row in grown for number in range(grown[row], group)]
        completions = concatenate([completions, *sample(missing)]) if missing else completions
        return [reorder(completions, torch.tensor(rows + missing).argsort())]

    def branches(self, policy: CausalModel, tokenized: TokenizedPrompts, completions: SampledCompletions,
                 decoding: Decoding, after: Sequence[int], first: int) -> "list[list[Branch]]":
        """The possible branches of each of the completions [b] from the place `after` on, numbered from `first`."""
        tokens, logp, likeliest = alternatives(policy, tokenized, completions.ids, completions.mask, decoding)
        fits = completions.mask & (logp.exp() > self.likely) & (likeliest.exp() - logp.exp() <= self.gap)
        fits &= ~torch.isin(tokens, torch.tensor(policy.ends))
        fits[:, -1] = False  # a branch needs room behind it
        return [[Branch(first + row, at, int(tokens[row, at]), logp[row, at].item())
                 for at in fits[row].nonzero().flatten().tolist() if at >= after[row]] for row in range(len(tokens))]


@dataclass(frozen=True)
class Branch:
    """Candidate branch: it leaves the completion `parent` at the token index `place` by another token."""

    parent: int
    place: int
    token: int
    logp: float


def complete_branches(policy: CausalModel, tokenized: TokenizedPrompts, completions: SampledCompletions,
                      decoding: Decoding, generators: Generators, branches: Sequence[Branch]) -> SampledCompletions:
    """The completions of these branches, drawn to their end."""
    prefixes = [torch.cat([completions.ids[branch.parent, :branch.place], torch.tensor([branch.token])])
                for branch in branches]
    drawn = continue_prefixes(policy, tokenized, prefixes, decoding, generators)
    logp = drawn.logp.clone()
    for row, branch in enumerate(branches):
        logp[row, :branch.place] = completions.logp[branch.parent, :branch.place]
        logp[row, branch.place] = branch.logp
    return replace(drawn, logp=logp)


def edit_distance(one: Sequence[int], other: Sequence[int]) -> int:
    """The Levenshtein distance: the fewest insertions, deletions and substitutions that turn one into the other."""
    before = list(range(len(other) + 1))
    for number, token in enumerate(one, 1):
        now = [number]
        for place, another in enumerate(other, 1):
            now.append(min(before[place] + 1, now[-1] + 1, before[place - 1] + (token != another)))
        before = now
    return before[-1]
