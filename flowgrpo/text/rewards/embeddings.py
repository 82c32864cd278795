"""Embeddings of texts by an encoder of transformers, and the similarity to a reference by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.local_model import LocalModel, pretrained
from flowgrpo.text.rewards.answer_keys import LICENCE, keys, several, spoken, stated


def pooled(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the states where the mask is 1, of length 1: [B, L, D], [B, L] -> [B, D] float32."""
    mean = (states.float() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    return torch.nn.functional.normalize(mean, dim=1)


class TextEncoder(LocalModel):
    """Reward that embeds texts by a model of transformers; a subclass has its arguments `model`, `revision` and
    `longest`."""

    model: str
    revision: str | None
    longest: int

    def _loaded(self) -> tuple[Any, ...]:
        from transformers import AutoModel, AutoTokenizer

        network = pretrained(self.reward, AutoModel, self.model, self.revision, "model", dtype=self.float_type)
        return network, pretrained(self.reward, AutoTokenizer, self.model, self.revision, "model")

    @torch.no_grad()
    def embedded(self, texts: Sequence[str]) -> Tensor:
        """Return the mean last states of B texts, of length 1: [B, D] float32 on the CPU. Tokens behind the first
        `longest` are not read; a text without tokens has zeros."""
        network, tokenizer = self.models[:2]
        rows = [tokenizer(text)["input_ids"][:self.longest] for text in texts]
        parts = []
        for at in range(0, len(rows), self.batch_size):
            some = rows[at:at + self.batch_size]
            length = max(1, *map(len, some))
            ids = torch.tensor([row + [0] * (length - len(row)) for row in some], device=self.device)
            mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in some], device=self.device)
            parts.append(pooled(network(input_ids=ids, attention_mask=mask).last_hidden_state, mask).cpu())
        return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class SemanticSimilarity(TextEncoder):
    """Cosine of the embeddings of a completion's answer and of its reference, of several the largest.

    The semantic side of MT-R1-Zero's mixed reward beside `translation`, which is lexical; the paper's is COMET.
    model: an encoder of transformers, its folder or name on the hub, multilingual for translations; its last states
        are averaged. revision: of the hub. longest: tokens that are read.
    key: of the metadata, a text or a list of references; None for a prompt without it. The answer is found as for
        `translation`.
    parts: model and tokenizer, ready-made. dtype (fp32), device and batch_size (32): as in `LocalModel`.
    """

    model: str = ""
    revision: str | None = None
    longest: int = 512
    key: str = "answer"
    batch_size: int = field(default=32, kw_only=True)
    reward = "semantic_similarity"
    about = About(modality="text", range=(-1, 1), needs="", licence=f"{LICENCE}, the model's")
    keyed = True  # nothing is scored without the key

    def __post_init__(self) -> None:
        if self.longest < 1 or not (self.model or self.parts):
            raise UserError(f"reward 'semantic_similarity': got model {self.model!r} and longest {self.longest}, "
                            "expected args: {model: FOLDER}, and longest from 1")
        super().__post_init__()

    def __call__(self, completions: Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        references = keys(self.reward, metadata, self.key, prompts, several)
        answers = [stated(text) or spoken(text).strip() for text in completions]
        texts = sorted({*answers, *(text for accepted in references for text in accepted or ())})
        of = dict(zip(texts, self.embedded(texts)))
        return [None if accepted is None else max(float(of[answer] @ of[text]) for text in accepted)
                for answer, accepted in zip(answers, references)]
