"""Scores of the steps of completions, measured while they are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flowgrpo.text.credit.step_scores import StepScores, text_steps
from flowgrpo.text.samplers.language_model import LanguageModel
from flowgrpo.types import Completion, Completions, Segmented


def scored_steps(policy: LanguageModel, taken: Completions, spread: StepScores, judge: Callable[..., Tensor]
                 ) -> Segmented:
    """Return the completions in steps, with the score of each.

    judge: judge(texts, votes, prompts, None, names) returns the total rewards [., votes] of texts of the prompts.
    """
    def text(ids: Sequence[int]) -> str:
        return policy.tokenizer.decode(ids, skip_special_tokens=True)

    segments, texts, of = torch.zeros_like(taken.ids), [], []
    for row, (ids, mask) in enumerate(zip(taken.ids, taken.old.mask.cpu())):
        count = int((mask * torch.arange(1, len(mask) + 1)).max())  # to the last one that counts
        start = 0
        for number, end in enumerate(text_steps(ids[:count].tolist(), spread.ends, text)):
            segments[row, start:] = number
            shown = ids[0 if spread.whole else start:end].tolist()
            texts += [Completion(text(shown), len(shown))] * spread.votes
            of.append((row, number))
            start = end
    scores = torch.full((len(taken.ids), int(segments.max()) + 1), torch.nan)
    if of:
        rows, numbers = torch.tensor(of).unbind(1)
        prompts = taken.prompts[rows].repeat_interleave(spread.votes)
        scores[rows, numbers] = spread.voted(judge(texts, spread.votes, prompts, None, spread.rewards)).to(scores)
    return Segmented(**vars(taken), segments=segments, values=scores)
