"""A tiny random masked language model, built in code: a real BERT with a few thousand weights."""

from functools import partial

import torch

from flowgrpo.starter.arithmetic import build_tokenizer
from flowgrpo.text.policies.masked_lm import MaskedLM
from flowgrpo.text.policies.text_weights import load_causal_lm
from flowgrpo.text.samplers.decoding import Unmasking
from tests.helpers import tiny_text as tiny

load_masked_lm = partial(load_causal_lm, classes=MaskedLM.classes)


def model(seed: int = 0):
    """(model, tokenizer), far enough from flat distributions."""
    from transformers import BertConfig, BertForMaskedLM

    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    torch.manual_seed(seed)
    return BertForMaskedLM(BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, initializer_range=0.3, pad_token_id=tokenizer.pad_token_id)), tokenizer


def policy(loaded=None, rank: int = 2, unmasking: Unmasking = Unmasking(), **text) -> MaskedLM:
    return MaskedLM(*(loaded or model()), tiny.Adapter(rank=rank), tiny.Text(**{"max_tokens": 6} | text), unmasking)
