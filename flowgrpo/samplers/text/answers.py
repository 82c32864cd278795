"""Reference answers of prompts as samples of their groups."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flowgrpo.data.prompts import Prompt
from flowgrpo.samplers.text.decoding import Decoding
from flowgrpo.samplers.text.language_model import CausalModel
from flowgrpo.samplers.text.records import SampledCompletions, TokenizedPrompts
from flowgrpo.types import Completion

KEYS = ("solution", "answer")  # of a prompt's metadata: the first that it has


def answer_of(prompt: Prompt) -> str | None:
    """Return the answer in a prompt's metadata, or None without one."""
    return next((str(prompt.metadata[key]) for key in KEYS if prompt.metadata.get(key) is not None), None)


@torch.no_grad()
def with_answers(policy: CausalModel, tokenized: TokenizedPrompts, prompts: Tensor, at: Tensor,
                 completions: SampledCompletions, decoding: Decoding) -> SampledCompletions:
    """Return completions of the prompts [B], with the rows `at` (bool [B]) replaced by their prompts' answers.

    An answer has an end token and the policy's log-probabilities. A prompt without an answer, or with too long an
    answer, keeps its sample.
    """
    answers = {row: text for row in at.nonzero()[:, 0].tolist()
               if (text := tokenized.answers[int(prompts[row])]) is not None}
    tokens = {row: torch.tensor([*policy.tokenizer(text, add_special_tokens=False)["input_ids"], policy.ends[0]])
              for row, text in answers.items()}
    rows = [row for row in tokens if len(tokens[row]) <= completions.ids.shape[1]]
    expert = torch.isin(torch.arange(len(at)), torch.tensor(rows, dtype=torch.int64))
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
