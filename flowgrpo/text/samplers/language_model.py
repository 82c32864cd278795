"""Language models as samplers of completions read them, and what these return: protocols, tokenized prompts, sampled
completions, and reference answers as samples of their groups.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from flowgrpo.config.sections import Text
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.types import Completion, Scored


@dataclass(frozen=True, eq=False)
class TokenizedPrompts:
    """Prompts as the model reads them.

    prompts: their texts.
    ids: their tokens, int64 [S] each.
    answers: of each prompt, the answers that may join its group, if a method asks for them.
    references: the right answers, by which those are ranked; empty: they are not.
    begun: the tokens of each row's completion with which its ids end, if they hold any.
    """

    prompts: list[str]
    ids: list[Tensor]
    answers: Sequence[Sequence[str]] = field(default=(), kw_only=True)
    references: Sequence[str | None] = field(default=(), kw_only=True)
    begun: Sequence[Tensor] = field(default=(), kw_only=True)

    def rows(self, index: Tensor) -> "TokenizedPrompts":
        """The rows `index` (int64 [B]); a row may be taken several times."""
        return TokenizedPrompts([self.prompts[i] for i in index.tolist()], [self.ids[i] for i in index.tolist()])


@dataclass(frozen=True, eq=False)
class SampledCompletions:
    """Completions of B prompts.

    ids: int64 [B,L].
    logp: float32 [B,L].
    mask: bool [B,L], true for drawn tokens up to the end.
    cut: bool [B], those without an end.
    texts: the decoded completions.
    expert: bool [B], those that are their prompts' answers.
    steps: int64 [B,L], of an unmasking, at which each token was drawn; logp is then the replay's, at `shrink`.
    images: float32 [B,3,H,W] in [0, 1], on the CPU, of image tokens.
    """

    ids: Tensor
    logp: Tensor
    mask: Tensor
    cut: Tensor
    texts: list[Completion]
    expert: Tensor | None = field(default=None, kw_only=True)
    steps: Tensor | None = field(default=None, kw_only=True)
    images: Tensor | None = field(default=None, kw_only=True)


class CausalModel(Protocol):
    """Members of a `CausalLM` that samplers need; its methods are described there.

    ends: the tokens that end a completion.
    model: of transformers.
    quality: a run's head that gives logits [n] of the success of partial completions, of states [n,H]; None: none.
    """

    tokenizer: Any
    text: Text
    ends: list[int]
    model: Any
    device: torch.device
    quality: Callable[[Tensor], Tensor] | None

    @property
    def head(self) -> Callable[[Tensor], Tensor]: ...
    def head_alone(self, tokenized: TokenizedPrompts) -> bool: ...
    def generators(self, seeds: Iterable[int]) -> list[Generator]: ...
    def sample(self, tokenized: TokenizedPrompts, decoding: Decoding, generators: Sequence[Generator], greedy: Tensor
               ) -> SampledCompletions: ...
    def log_probs(self, tokenized: TokenizedPrompts, prompts: Tensor, ids: Tensor, mask: Tensor, decoding: Decoding,
                  entropy: bool | str = False) -> Scored: ...
    def states_before(self, tokenized: TokenizedPrompts, ids: Tensor) -> Tensor: ...
    def detokenize(self, ids: Tensor, mask: Tensor, prompts: Sequence[str]) -> list[Completion]: ...
    def opened(self, prompts: Sequence[str]) -> list[str]: ...
    def answer(self, text: str) -> Tensor: ...


@torch.no_grad()
def rank_answers(policy: CausalModel, tokenized: TokenizedPrompts) -> TokenizedPrompts:
    """The prompts with their answers sorted: first the one that the policy comprehends best (AMPO, 2510.02227).
    It is the one whose reasoning makes the prompt's reference likeliest. Without a reference the order stays."""
    answers = []
    for place, (texts, reference) in enumerate(zip(tokenized.answers, tokenized.references)):
        if len(texts) > 1 and reference:
            scores = comprehension(policy, tokenized, place, texts, reference)
            texts = [texts[i] for i in sorted(range(len(texts)), key=lambda i: -scores[i])]
        answers.append(texts)
    return replace(tokenized, answers=answers)


def comprehension(policy: CausalModel, tokenized: TokenizedPrompts, place: int, texts: Sequence[str], reference: str
                  ) -> list[float]:
    """Of each answer the mean log-probability of the reference's tokens behind its reasoning, the text before the last
    place that has the reference. place: of the prompt."""
    def tokens(text: str) -> Tensor:
        return torch.tensor(policy.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)

    ids = tokens(reference)
    asked = tokenized.rows(torch.full((len(texts),), place))
    reasoning = [tokens(text.rpartition(reference)[0] if reference in text else text) for text in texts]
    asked = replace(asked, ids=[torch.cat([before, added.to(before)]) for before, added in zip(asked.ids, reasoning)])
    mask = torch.ones_like(ids, dtype=torch.bool)[None]
    return [policy.log_probs(asked, torch.tensor([row]), ids[None], mask, Decoding()).logp.mean().item()
            for row in range(len(texts))]


@torch.no_grad()
def with_answers(policy: CausalModel, tokenized: TokenizedPrompts, prompts: Tensor, number: Tensor,
                 completions: SampledCompletions, decoding: Decoding) -> SampledCompletions:
    """Completions of the prompts [B], with rows replaced by their prompts' answers.
    number: int64 [B], the place of the row's answer among its prompt's; below 0: none. An answer has an end token and
    the policy's log-probabilities. A prompt with fewer answers, or with too long an answer, keeps its sample."""
    known = {row: tokenized.answers[int(prompts[row])] for row in (number >= 0).nonzero()[:, 0].tolist()}
    answers = {row: texts[int(number[row])] for row, texts in known.items() if number[row] < len(texts)}
    tokens = {row: policy.answer(text) for row, text in answers.items()}
    rows = [row for row in tokens if len(tokens[row]) <= completions.ids.shape[1]]
    expert = torch.isin(torch.arange(len(number)), torch.tensor(rows, dtype=torch.int64))
    if not rows:
        return replace(completions, expert=expert)
    ids, logp, mask, cut = (completions.ids.clone(), completions.logp.clone(), completions.mask.clone(),
                            completions.cut.clone())
    texts = list(completions.texts)
    for row in rows:
        count = len(tokens[row])
        ids[row, :count], mask[row], cut[row] = tokens[row], torch.arange(ids.shape[1]) < count, False
        [tag] = policy.opened([tokenized.prompts[int(prompts[row])]])
        texts[row] = Completion(answers[row], count, opened=tag)
    logp[rows] = policy.log_probs(tokenized, prompts[rows], ids[rows], mask[rows], decoding).logp.cpu().to(logp)
    return replace(completions, ids=ids, logp=logp, mask=mask, cut=cut, texts=texts, expert=expert)
