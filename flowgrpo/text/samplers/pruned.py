"""Completions that are begun and not all finished: a part of a method's `draws`, as in `groups`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.text.samplers.language_model import CausalModel
from flowgrpo.text.samplers.partial import Begun, begin, completed, go_on
from flowgrpo.text.samplers.records import SampledCompletions, TokenizedPrompts
from flowgrpo.types import wide


@dataclass(frozen=True)
class PrunedDraws:
    """Group of begun completions expected to be half right (ARRoL); the others are stopped.

    After `tokens` tokens the run's quality head, a linear one on the policy's last hidden state, predicts the chance of
    success of each. A group goes on: the likeliest and the least likely to succeed, as many of each as bring the
    expected number of successes nearest to half. The others are neither scored, compared nor trained. The head learns
    from the trained samples after every epoch; in the first one it knows nothing, and any go on. The choice, and the
    new samples of the pool in the place of those that are stopped, are a reconstruction.

    begun: completions that are begun per sample of a group.
    right: total reward from which a completion is a success.
    lr, passes: of AdamW; the number of steps over all of an epoch's completions, by cross-entropy.
    """

    begun: int = 2
    tokens: int = 128
    right: float = 0.5
    lr: float = 1e-3
    passes: int = 4
    causal, leaves = True, 1

    def __post_init__(self) -> None:
        if self.begun < 2 or self.tokens < 1:
            raise ValueError(f"PrunedDraws: begun is {self.begun} and tokens {self.tokens}, expected 2 or more, and 1 "
                             "or more")
        if not self.lr > 0 or self.passes < 1:
            raise ValueError(f"PrunedDraws: lr is {self.lr} and passes {self.passes}, expected above 0, and 1 or more")

    def __call__(self, policy: CausalModel, tokenized: TokenizedPrompts, decoding: Decoding,
                 generators: Sequence[torch.Generator], greedy: Tensor, group: int, micro_batch: int
                 ) -> list[SampledCompletions]:
        most = policy.text.max_tokens
        if type(tokenized) is not TokenizedPrompts:
            raise UserError("parts.draws PrunedDraws continues completions from the middle, for which prompts with "
                            "images are not made: use another")
        if self.tokens >= most:
            raise UserError(f"text.max_tokens is {most}, and parts.draws.tokens is {self.tokens}, after which samples "
                            "are stopped: set it below")
        firsts = range(0, len(generators), group)
        prompts = tokenized.rows(torch.tensor(firsts))
        seeds = [torch.randint(2**62, (self.begun,), generator=generator).tolist() for generator in generators]
        groups = [begin(sum(seeds[first:first + group], []), most) for first in firsts]
        groups = go_on(policy, prompts, groups, decoding, self.tokens, micro_batch, 0)
        groups = [_rows(of, self.chosen(chances, group))
                  for of, chances in zip(groups, self.chances(policy, prompts, groups, micro_batch))]
        return [completed(policy, go_on(policy, prompts, groups, decoding, most - self.tokens, micro_batch, 0))]

    def chosen(self, chances: Tensor, group: int) -> Tensor:
        """Return the samples that go on, int64 [group], ascending, of the chances of success [pool]."""
        order = chances.argsort(descending=True, stable=True)
        ends = [torch.cat([order[:best], order[len(order) - group + best:]]) for best in range(group + 1)]
        expected = torch.stack([chances[of].sum() for of in ends])
        return ends[int((expected - group / 2).abs().argmin())].sort()[0]

    @torch.no_grad()
    def chances(self, policy: CausalModel, prompts: TokenizedPrompts, groups: Sequence[Begun], micro_batch: int
                ) -> Tensor:
        """Return the predicted chances of success of groups that are begun, [P, pool]; 0.5 without a quality head."""
        pool = len(groups[0].ids)
        if policy.quality is None:
            return torch.full((len(groups), pool), 0.5)
        of = torch.arange(len(groups)).repeat_interleave(pool)
        ids, lengths, ended = (torch.cat([getattr(one, name) for one in groups]) for name in ("ids", "lengths",
                                                                                              "ended"))
        states = looked(policy, prompts, of, ids, lengths - ended.long(), micro_batch)
        return policy.quality(states).sigmoid().cpu().view(len(groups), pool)


@torch.no_grad()
def looked(policy: CausalModel, tokenized: TokenizedPrompts, prompts: Tensor, ids: Tensor, places: Tensor,
           micro_batch: int) -> Tensor:
    """Return the states [n,H], float32 or wider, before the tokens at `places` [n] of completions ids [n,L] of the
    prompts [n]."""
    found = []
    for at in torch.arange(len(ids)).split(micro_batch):
        begun = ids[at, :int(places[at].max()) + 1].to(policy.device)
        states = policy.states_before(tokenized.rows(prompts[at]), begun)
        found.append(states[torch.arange(len(at)), places[at].to(states.device)])
    return wide(torch.cat(found))[0]


def _rows(group: Begun, at: Tensor) -> Begun:
    return Begun(**{field.name: getattr(group, field.name)[at] for field in fields(group)})
