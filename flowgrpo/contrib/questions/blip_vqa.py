"""Probability of "yes" by BLIP-VQA (2201.12086), as T2I-CompBench asks it (2307.06350)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowgrpo.rewards.local_model import LocalModel, pretrained
from flowgrpo.rewards.preprocessing import Preparation

LONGEST = 35  # tokens of a question


@dataclass(frozen=True)
class BlipVqa(LocalModel):
    """Probability of "yes" against "no" as the answer to a question about an image.

    model, revision: a BLIP of transformers for questions, a folder or hub id. size: pixels of a side, to which images
    are squeezed; positions are interpolated.
    parts: model and tokenizer, ready-made. dtype (fp32), device and batch_size (16 questions): as in `LocalModel`.
    Raises UserError if the weights are unavailable.
    """

    model: str = "Salesforce/blip-vqa-capfilt-large"
    revision: str | None = None
    size: int = 480
    batch_size: int = field(default=16, kw_only=True)
    reward, parameters = "t2i_compbench", 361e6

    def _loaded(self) -> tuple[Any, Any]:
        from transformers import AutoTokenizer, BlipForQuestionAnswering

        return (pretrained("t2i_compbench", BlipForQuestionAnswering, self.model, self.revision, "model", "vqa",
                           dtype=self.float_type),
                pretrained("t2i_compbench", AutoTokenizer, self.model, self.revision, "model", "vqa"))

    def __call__(self, images: Tensor, questions: Sequence[str]) -> Tensor:
        """Return the probability for each image [B, 3, H, W] in [0, 1] and its question: [B] on the CPU."""
        return self.batched(self._probabilities, images, questions)

    def _probabilities(self, images: Tensor, questions: list[str]) -> Tensor:
        model, tokenizer = self.models
        pictures = Preparation(self.size, "squash")(images.to(self.device)).to(model.dtype)
        seen = model.vision_model(pixel_values=pictures, interpolate_pos_encoding=True).last_hidden_state
        read = tokenizer([plain(question) for question in questions], padding=True, truncation=True,
                         max_length=LONGEST, return_tensors="pt").to(self.device)
        read.input_ids[:, 0] = model.config.text_config.vocab_size - 1  # the mark of the encoder, as in training
        states = model.text_encoder(input_ids=read.input_ids, attention_mask=read.attention_mask,
                                    encoder_hidden_states=seen).last_hidden_state
        start = torch.full((len(questions), 1), model.decoder_start_token_id, device=states.device)
        logits = model.text_decoder(input_ids=start, encoder_hidden_states=states,
                                    encoder_attention_mask=read.attention_mask).logits[:, 0]
        return logits[:, tokenizer.convert_tokens_to_ids(["yes", "no"])].float().softmax(-1)[:, 0]


def plain(question: str) -> str:
    """Return a question as BLIP was trained on it: lower case, without punctuation but the question mark."""
    return re.sub(r'[.!"()*#:;~]', "", question.lower()).rstrip()
