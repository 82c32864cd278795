"""Fixtures of rewards with a model: tiny random ones."""

import json

import pytest
import torch

from tests.helpers.tiny_blip import WORDS, word_tokenizer
from tests.helpers.tiny_scorers import TINY


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny architecture that open_clip knows by the name, with a checkpoint of it."""
    import open_clip
    folder = tmp_path_factory.mktemp("clip")
    (folder / "tiny-clip-of-tests.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(folder)
    torch.manual_seed(3)
    model = open_clip.create_model("tiny-clip-of-tests", pretrained=None).eval()
    torch.save({"epoch": 1, "name": "tiny", "state_dict": model.state_dict()}, folder / "tiny.pt")
    return model, open_clip.get_tokenizer("tiny-clip-of-tests"), str(folder / "tiny.pt")


@pytest.fixture(scope="module")
def pick(tmp_path_factory):
    """A tiny CLIP of transformers and a tokenizer, both as folders."""
    from transformers import CLIPConfig, CLIPModel
    tokenizer = word_tokenizer("<s> $A </s>", ["<pad>", "<s>", "?"], [*WORDS, "</s>"])
    end = len(tokenizer) - 1
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**layers, "vocab_size": end + 1, "max_position_embeddings": 12, "bos_token_id": 1,
                     "eos_token_id": end, "pad_token_id": 0, "projection_dim": 8, "initializer_range": 0.2},
        vision_config={**layers, "image_size": 32, "patch_size": 8, "projection_dim": 8, "initializer_range": 0.2},
        projection_dim=8, logit_scale_init_value=1.7)
    torch.manual_seed(5)
    model, folder = CLIPModel(config).eval(), tmp_path_factory.mktemp("pick")
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return model, tokenizer, str(folder)


@pytest.fixture(scope="module")
def encoder(pick):
    from transformers import CLIPVisionModelWithProjection
    return CLIPVisionModelWithProjection.from_pretrained(pick[2]).eval()


@pytest.fixture(scope="module")
def bert():
    return word_tokenizer("[CLS] $A [SEP]", ["[PAD]", "[CLS]", "[SEP]", "?"], WORDS)


@pytest.fixture(scope="module")
def answering():
    """A tiny InstructBLIP on a tiny T5, its tokenizer and that of its Q-Former."""
    from transformers import (
        InstructBlipConfig,
        InstructBlipForConditionalGeneration,
        InstructBlipQFormerConfig,
        InstructBlipVisionConfig,
        T5Config,
    )
    words = [*WORDS, "is", "this", "or", "yes", "no"]
    texts = word_tokenizer("$A </s>", ["<pad>", "</s>", "?"], words)
    queries = word_tokenizer("[CLS] $A [SEP]", ["[PAD]", "[CLS]", "[SEP]", "?"], words)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = InstructBlipConfig(
        vision_config=InstructBlipVisionConfig(**small, image_size=16, patch_size=8, initializer_range=0.3),
        qformer_config=InstructBlipQFormerConfig(**small, vocab_size=40, encoder_hidden_size=16, initializer_range=0.3,
                                                 max_position_embeddings=130),
        text_config=T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
                             decoder_start_token_id=0, pad_token_id=0, eos_token_id=1),
        num_query_tokens=3, image_token_index=39, initializer_range=0.3)
    torch.manual_seed(13)
    model = InstructBlipForConditionalGeneration(config)
    with torch.no_grad():
        for name, value in model.named_parameters():  # so that images and questions weigh in the answer
            if value.ndim > 1:
                value.normal_(0, 0.5)
    return model.eval(), texts, queries
