"""Reference answers of prompts as samples of their groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowgrpo.data.prompts import Prompt
from flowgrpo.samplers.text.decoding import Decoding
from flowgrpo.samplers.text.records import SampledCompletions, TokenizedPrompts
from flowgrpo.types import Completion

KEYS = ("solution", "answer")  # of a prompt's metadata: the first that it has


def answer_of(prompt: Prompt) -> str | None:
    """Return the answer in a prompt's metadata, or None without one."""
    return next((str(prompt.metadata[key]) for key in KEYS if prompt.metadata.get(key) is not None), None)


@torch.no_grad()
def with_answers(policy: Any, asked: TokenizedPrompts, prompts: Tensor, at: Tensor, made: SampledCompletions,
                 decoding: Decoding) -> SampledCompletions:
    """Return completions of the prompts [B], with the rows `at` (bool [B]) replaced by their prompts' answers.

    An answer has an end token and the policy's log-probabilities. A prompt without an answer, or with too long an
    answer, keeps its sample.
    """
    answers = {row: text for row in at.nonzero()[:, 0].tolist() if (text := asked.answers[prompts[row]]) is not None}
    tokens = {row: torch.tensor([*policy.tokenizer(text, add_special_tokens=False)["input_ids"], policy.ends[0]])
              for row, text in answers.items()}
    rows = [row for row in tokens if len(tokens[row]) <= made.ids.shape[1]]
    expert = torch.isin(torch.arange(len(at)), torch.tensor(rows, dtype=torch.int64))
    if not rows:
        return replace(made, expert=expert)
    ids, logp, mask, cut, texts = (made.ids.clone(), made.logp.clone(), made.mask.clone(), made.cut.clone(),
                                   list(made.texts))
    for row in rows:
        count = len(tokens[row])
        ids[row, :count], mask[row], cut[row] = tokens[row], torch.arange(ids.shape[1]) < count, False
        texts[row] = Completion(answers[row], count)
    logp[rows] = policy.log_probs(asked, prompts[rows], ids[rows], mask[rows], decoding).logp.cpu().to(logp)
    return replace(made, ids=ids, logp=logp, mask=mask, cut=cut, texts=texts, expert=expert)
