"""Completions drawn anew from their most uncertain tokens: parts of a method's `draws`, as in `groups`."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from flowgrpo.parts import AtLeast, part
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.text.samplers.groups import concatenate, regrown, reorder, rows_of_log_probs, sample_rows
from flowgrpo.text.samplers.language_model import CausalModel, SampledCompletions, TokenizedPrompts
from flowgrpo.types import unwrap


@part("draws", causal=True, leaves=1, jointly={"share fresh top": "0 to below 1, 0 to 1, and 1 or more"})
class CriticalTokens:
    """Group with a share sampled anew from others' uncertain tokens (CURE, stage 1).

    A regrown completion keeps the tokens before its place, one of the `top` tokens with the largest entropy, by lot,
    and draws the rest. Both trajectories are trained. In CURE's second stage draws are independent again: continue the
    run with `draws: {type: Independent}`.

    share: of a group's samples, those that are regrown, from the other ones in turn.
    top: number of candidate places; 1 is the most uncertain.
    fresh: probability that a sample starts again from the prompt instead (ROSE's epsilon).
    """

    share: Annotated[float, AtLeast(0, below=1)] = 0.5
    top: Annotated[int, AtLeast(1)] = 1
    fresh: Annotated[float, AtLeast(0, to=1)] = 0.0

    def __call__(self, policy: CausalModel, tokenized: TokenizedPrompts, decoding: Decoding,
                 generators: Sequence[torch.Generator], greedy: Tensor, group: int, micro_batch: int
                 ) -> list[SampledCompletions]:
        kept, every = group - round(self.share * group), torch.arange(len(generators))
        anew = torch.tensor([float(torch.rand((), generator=generators[row])) < self.fresh if row % group >= kept
                             else True for row in every.tolist()])
        rows, new = every[anew], every[~anew]
        whole = concatenate(sample_rows(policy, tokenized, decoding, generators, greedy, rows, micro_batch))
        pieces = [whole]
        for at in new.split(micro_batch) if len(new) else ():
            parents = torch.searchsorted(rows, at - at % group + (at % group - kept) % kept)
            of, drawing = reorder(whole, parents), [generators[i] for i in at]
            uncertain = self.uncertainty(policy, tokenized.rows(at), of, decoding)
            pieces.append(regrown(policy, tokenized.rows(at), decoding, drawing, of,
                                  self.places(uncertain, of.mask, drawing)))
        return [reorder(concatenate(pieces), torch.cat([rows, new]).argsort())]

    def places(self, uncertain: Tensor, mask: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Place of each completion, int64 [b], among its `top` largest of `uncertain` [b,L]."""
        ranked = uncertain.masked_fill(~mask, -torch.inf).argsort(dim=1, descending=True, stable=True)
        tops = mask.sum(1).clamp(1, self.top).tolist()
        lots = [int(torch.randint(top, (), generator=generator)) for top, generator in zip(tops, generators)]
        return ranked[torch.arange(len(lots)), torch.tensor(lots)]

    def uncertainty(self, policy: CausalModel, tokenized: TokenizedPrompts, completions: SampledCompletions,
                    decoding: Decoding) -> Tensor:
        """Entropy of the policy's distribution at each token of the completions, in nats, [b,L] on the CPU."""
        with torch.no_grad():
            scored = policy.log_probs(tokenized, torch.arange(len(completions.ids)), completions.ids, completions.mask,
                                      decoding, entropy=True)
        return unwrap(scored.entropy).cpu()


@part("draws")
class SemanticBranches(CriticalTokens):
    """`CriticalTokens` where the meanings of the next token differ most (ROSE): the largest `semantic_entropy`.

    candidates: most likely tokens that are compared. For the credit of the branches' segments use the spread
    SegmentTree.
    """

    candidates: Annotated[int, AtLeast(2)] = 20

    @torch.no_grad()
    def uncertainty(self, policy: CausalModel, tokenized: TokenizedPrompts, completions: SampledCompletions,
                    decoding: Decoding) -> Tensor:
        entropy, embeddings = torch.zeros(completions.ids.shape), policy.model.get_input_embeddings().weight
        for row, counted, log_probs in rows_of_log_probs(policy, tokenized, completions.ids, completions.mask, decoding,
                                                         "set parts.draws: {type: CriticalTokens}"):
            entropy[row, counted] = semantic_entropy(log_probs, embeddings, self.candidates).cpu()
        return entropy


def semantic_entropy(log_probs: Tensor, embeddings: Tensor, candidates: int) -> Tensor:
    """-H sum over i != j of p_i p_j cos(e_i, e_j) of log_probs [n,V] of the next token: [n] (ROSE, 2601.05053,
    its released code).

    H: the entropy of the token, in nats. e: embeddings [V,D]. The sum is over pairs of the likeliest `candidates`.
    """
    log_probs = log_probs.float()
    top = log_probs.topk(min(candidates, log_probs.shape[1]), dim=1)
    shares, vectors = top.values.exp(), torch.nn.functional.normalize(embeddings.float()[top.indices], dim=-1)
    alike = (shares[..., None] * vectors).sum(1).square().sum(1) - shares.square().sum(1)
    return alike * (log_probs.exp() * log_probs).nan_to_num(0).sum(1)
