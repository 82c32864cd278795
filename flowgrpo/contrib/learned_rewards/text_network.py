"""Network of a preference reward of texts: a prompt and its completion to a score per aspect.

It has the three parts of the networks of images (preference_networks.py), with texts in place of images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flowgrpo.contrib.learned_rewards.preference_networks import TOKENIZER
from flowgrpo.errors import UserError
from flowgrpo.rewards.local_model import loading
from flowgrpo.starter import FOLDERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LANGUAGE = "language_model"  # the folder of the body's configuration
LONGEST = 1024  # tokens of a prompt with its completion; a longer text loses its beginning


class TextHead(nn.Module):
    """Language model with a linear head on its last state, at the end of prompt and completion.

    body, tokenizer: of transformers. aspects: A. frozen: the body is not trained, and `rows` are its states.
    """

    def __init__(self, body: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, aspects: int, frozen: bool = False):
        super().__init__()
        self.tokenizer, self.frozen, self.config = tokenizer, frozen, body.config
        self.parts: tuple[Any] = (body,)  # a tuple: not registered
        if not frozen:
            self.body = body
        width = body.config.get_text_config().hidden_size
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, aspects))

    @property
    def longest(self) -> int:
        """Maximum tokens of a prompt with its completion."""
        return min(LONGEST, getattr(self.config.get_text_config(), "max_position_embeddings", LONGEST))

    def tokens(self, prompt: str, text: str) -> list[int]:
        """Prompt and its completion as tokens: in the chat template if there is one, else one after the other with an
        end; the last `longest` of them."""
        tokenizer: Any = self.tokenizer
        if getattr(tokenizer, "chat_template", None):
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
            ids = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(prompt)["input_ids"] + tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return ids[-self.longest:]

    def rows(self, texts: Sequence[str], prompts: Sequence[str]) -> dict[str, Tensor]:
        """Ids and mask [B, longest], padded at the end; of a frozen body its last states [B, W]."""
        rows = [self.tokens(prompt, text) for prompt, text in zip(prompts, texts)]
        ids, mask = torch.zeros(2, len(rows), self.longest, dtype=torch.int64)
        for row, tokens in enumerate(rows):
            ids[row, :len(tokens)], mask[row, :len(tokens)] = torch.tensor(tokens), 1
        device = next(self.head.parameters()).device
        ids, mask = ids.to(device), mask.to(device)
        if not self.frozen:
            return {"ids": ids, "mask": mask}
        with torch.no_grad():
            return {"states": self._last(ids, mask).float()}

    def forward(self, **rows: Tensor) -> Tensor:
        """Scores [B, A] of `rows`."""
        states = rows["states"] if self.frozen else self._last(rows["ids"], rows["mask"])
        return self.head(states.to(next(self.head.parameters()).dtype))

    def _last(self, ids: Tensor, mask: Tensor) -> Tensor:
        """States [B, W] at the last tokens of ids [B, L]."""
        [body], length = self.parts, int(mask.sum(1).max())
        body.to(ids.device)
        states = body(input_ids=ids[:, :length], attention_mask=mask[:, :length], use_cache=False).last_hidden_state
        return states[torch.arange(len(ids), device=ids.device), mask.sum(1) - 1]


def on_model(source: str, aspects: int, frozen: bool) -> TextHead:
    """Build a fresh network, by torch's global seed, on a causal language model: `starter_text`, a folder or a hub id.
    Raises UserError if it is unavailable."""
    from transformers import AutoModel, AutoTokenizer

    place = str(FOLDERS.get(source, source))
    with loading(f"language model {source}", "expected starter_text, or a folder or hub id of a language model", place):
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        body = AutoModel.from_pretrained(place, dtype=torch.float32, trust_remote_code=False, use_safetensors=True)
    if body.config.is_encoder_decoder:
        raise UserError(f"--model {source}: {type(body).__name__} has an encoder and a decoder, expected a causal "
                        "language model")
    return TextHead(body.eval().requires_grad_(not frozen), tokenizer, aspects, frozen)


def build_text_head(folder: Path, aspects: int) -> TextHead:
    """Build the network from a folder's configuration and tokenizer, without its weights."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    body = AutoModel.from_config(AutoConfig.from_pretrained(folder / LANGUAGE, trust_remote_code=False))
    return TextHead(body.eval(), AutoTokenizer.from_pretrained(folder / TOKENIZER, trust_remote_code=False), aspects)
