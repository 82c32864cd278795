"""Recorded pairs of texts in place of sampled completions: nothing is drawn, and all else stays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.rollouts.base import GroupSampler, RewardValue, TotalReward
from flowgrpo.samplers.rollout import Part
from flowgrpo.text.rollouts.completions import TextRollouts
from flowgrpo.text.samplers.records import SampledCompletions, TokenizedPrompts
from flowgrpo.types import Completion

SIDES = ("chosen", "rejected")  # of a prompt's metadata, as `data.recorded_pairs` sets them


class RecordedTextRollouts(TextRollouts):
    """Causal language model whose group of a prompt is its recorded pair, the chosen text first."""

    def conditioning(self, batch: list[Prompt], epoch: int | None = None) -> TokenizedPrompts:
        """Tokenise prompts of `recorded_pairs`; their `answers` are the texts of their pairs, two per prompt."""
        return replace(super().conditioning(batch, epoch),
                       answers=[prompt.metadata[side] for prompt in batch for side in SIDES])

    def require(self, prompts: Sequence[Prompt]) -> None:
        """Raise UserError for the first text of a pair with more tokens than a completion may have."""
        most = self.config.text.max_tokens
        for prompt in prompts:
            for side in SIDES:
                if (count := len(self.tokens(prompt.metadata[side]))) > most:
                    raise UserError(f"preferences {self.config.preferences}: the {side} text of the prompt "
                                    f"{prompt.text[:60]!r} has {count} tokens, its end included, and text.max_tokens "
                                    f"is {most}: raise it, or leave the pair out")

    def tokens(self, text: str) -> Tensor:
        """Return the tokens [n] of a text, an end included."""
        return torch.tensor([*self.policy.tokenizer(text, add_special_tokens=False)["input_ids"],
                             self.policy.ends[0]])

    def sample(self, conditioning: TokenizedPrompts, epoch: int, judge: TotalReward,
               value: RewardValue | None = None, turn: int = 0) -> Iterator[tuple[Part, list[list[str]]]]:
        """Yield the pairs of the prompts, scored by the present policy, each part with its texts.

        judge, value, turn: of methods that draw; unused here.
        """
        for groups, prompts, _, _ in self.whole_groups(len(conditioning.prompts)):
            texts = [str(text) for text in conditioning.answers[2 * groups.start:2 * groups.stop]]
            with self.clock("encode"):
                recorded = self._recorded(conditioning, prompts, texts)
            yield self.target.record(groups, prompts, [recorded]), [[*recorded.texts]]

    def rescored(self, part: Part, conditioning: TokenizedPrompts) -> Part:
        """Return the part with the old scores of its replay, without weights: nothing was drawn."""
        return GroupSampler.rescored(self, part, conditioning)

    @torch.no_grad()
    def _recorded(self, conditioning: TokenizedPrompts, prompts: Tensor, texts: list[str]) -> SampledCompletions:
        """Return texts of the prompts [B] as completions, with the policy's log-probabilities."""
        rows, most = [self.tokens(text) for text in texts], self.config.text.max_tokens
        lengths = torch.tensor([len(row) for row in rows])
        ids = pad_sequence([*rows, torch.zeros(most, dtype=torch.int64)], batch_first=True,
                           padding_value=self.policy.padding)[:-1]
        mask = torch.arange(most) < lengths[:, None]
        before, size = self.policy.evaluations, self.geometry.micro_batch
        logp = torch.cat([self.policy.log_probs(conditioning, prompts[at], ids[at], mask[at],
                                                self.method.generation.decoding).logp.cpu()
                          for at in torch.arange(len(rows)).split(size)])
        self.policy.evaluations = before  # nothing was drawn
        return SampledCompletions(ids, logp, mask, torch.zeros(len(rows), dtype=torch.bool),
                                  [Completion(text, int(count)) for text, count in zip(texts, lengths)])
