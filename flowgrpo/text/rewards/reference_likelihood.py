"""Likelihood of a reference answer behind a completion's reasoning, under the policy itself or another model (DRO).

    reward: {reference_likelihood: {args: {before: "<answer>"}, transform: [rank]}}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowgrpo.rewards.about import About
from flowgrpo.text.rewards.answer_keys import LICENCE, keys, several
from flowgrpo.text.rewards.policy_model import PolicyModel


def reflective(logp: Tensor) -> Tensor:
    """Return DRO's reward of a group: the mean log-probability of the reference's tokens, weighted by their deviation
    over the group. [G, L] -> [G].

    A token that is as likely behind every reasoning has weight 0. Without any variance all tokens count alike.
    """
    spread = logp.std(0, correction=0)
    spread = spread if spread.max() > 1e-6 else torch.ones_like(spread)
    return logp @ (spread / spread.sum())


@dataclass(frozen=True, eq=False)
class ReferenceLikelihood(PolicyModel):
    """Log-probability of the reference answer behind a completion's reasoning, its tokens weighted as in `reflective`.

    The reasoning is the completion up to the last `before`, or all of it without one; `before` and the reference
    follow it.
    model: "policy", the one that is trained, as it is when it is scored; or a causal language model's folder or name on
    the hub. weighted: false takes the mean over the tokens.
    key: of the metadata, the reference, of several the first; None for a prompt without it.
    parts: model and tokenizer, ready-made. dtype, device, batch_size (8) of such a model: as in `LocalModel`.
    """

    model: str = "policy"
    key: str = "answer"
    before: str = "<answer>"
    weighted: bool = True
    batch_size: int = field(default=8, kw_only=True)
    reward = "reference_likelihood"
    about = About(modality="text", range=(None, 0), needs="", licence=f"{LICENCE}, the model's")
    group = True
    keyed = True  # nothing is scored without the key

    def __call__(self, completions: Sequence[str], prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
                 group: int, policy: Any = None) -> list[float | None]:
        references = keys(self.reward, metadata, self.key, prompts, several)
        values: list[float | None] = []
        for start in range(0, len(completions), group):
            accepted, texts = references[start], completions[start:start + group]
            if accepted is None:
                values += [None] * group
                continue
            logp = self.log_probs(prompts[start], texts, accepted[0], policy)
            values += (reflective(logp) if self.weighted else logp.mean(1)).tolist()
        return values

    @torch.no_grad()
    def log_probs(self, prompt: str, texts: Sequence[str], reference: str, policy: Any = None) -> Tensor:
        """Return the log-probability of each token of the reference behind each of G texts, float32 [G, L]."""
        network, tokenizer, begun = self._prompt(prompt, policy)
        wanted = tokenizer(reference, add_special_tokens=False)["input_ids"]
        rows = [begun + tokenizer(self.reasoning(text), add_special_tokens=False)["input_ids"] + wanted
                for text in texts]
        values = [self._scored(network, rows[at:at + self.batch_size], wanted)
                  for at in range(0, len(rows), self.batch_size)]
        return torch.cat(values)

    def reasoning(self, text: str) -> str:
        """Return a completion up to its last `before`, or all of it without one, with `before` behind it."""
        return (text.rpartition(self.before)[0] if self.before and self.before in text else text) + self.before

    @staticmethod
    def _scored(network: Any, rows: Sequence[list[int]], wanted: Sequence[int]) -> Tensor:
        """Return `log_probs` of some rows of tokens, which all end in the wanted ones; they are padded at their ends.
        """
        device, longest = next(network.parameters()).device, max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
        logits = network(input_ids=ids, attention_mask=mask).logits
        places = torch.tensor([[len(row) - len(wanted) - 1 + i for i in range(len(wanted))] for row in rows],
                              device=device)
        logp = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[2])).float().log_softmax(-1)
        target = torch.tensor(wanted, device=device).expand(len(rows), -1)
        return logp.gather(2, target[..., None])[..., 0].cpu()
