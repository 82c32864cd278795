"""Reference answers of prompts as samples of their groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.text.samplers.language_model import CausalModel
from flowgrpo.text.samplers.records import SampledCompletions, TokenizedPrompts
from flowgrpo.types import Completion


@torch.no_grad()
def ranked(policy: CausalModel, tokenized: TokenizedPrompts) -> TokenizedPrompts:
    """Return the prompts with their answers sorted: first the one that the policy comprehends best (AMPO, 2510.02227).

    It is the one whose reasoning makes the prompt's reference likeliest. Without a reference the order stays.
    """
    answers = []
    for place, (texts, reference) in enumerate(zip(tokenized.answers, tokenized.references)):
        if len(texts) > 1 and reference:
            scores = comprehension(policy, tokenized, place, texts, reference)
            texts = [texts[i] for i in sorted(range(len(texts)), key=lambda i: -scores[i])]
        answers.append(texts)
    return replace(tokenized, answers=answers)


def comprehension(policy: CausalModel, tokenized: TokenizedPrompts, place: int, texts: Sequence[str], reference: str
                  ) -> list[float]:
    """Return of each answer the mean log-probability of the reference's tokens behind its reasoning, the text before
    the last place that has the reference. place: of the prompt."""
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
    """Return completions of the prompts [B], with rows replaced by their prompts' answers.

    number: int64 [B], the place of the row's answer among its prompt's; below 0: none. An answer has an end token and
    the policy's log-probabilities. A prompt with fewer answers, or with too long an answer, keeps its sample.
    """
    known = {row: tokenized.answers[int(prompts[row])] for row in (number >= 0).nonzero()[:, 0].tolist()}
    answers = {row: texts[int(number[row])] for row, texts in known.items() if number[row] < len(texts)}
    tokens = {row: torch.tensor([*policy.tokenizer(text, add_special_tokens=False)["input_ids"], policy.ends[0]])
              for row, text in answers.items()}
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
        texts[row] = Completion(answers[row], count)
    logp[rows] = policy.log_probs(tokenized, prompts[rows], ids[rows], mask[rows], decoding).logp.cpu().to(logp)
    return replace(completions, ids=ids, logp=logp, mask=mask, cut=cut, texts=texts, expert=expert)
