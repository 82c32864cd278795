"""Rewards that hold a BLIP, on tiny random ones: against the networks written out, one picture at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from flowgrpo.errors import UserError
from flowgrpo.rewards import image_reward, local_model
from flowgrpo.rewards.find import find
from flowgrpo.rewards.image_reward import ImageReward
from flowgrpo.rewards.preprocessing import DEVIATION, MEAN
from flowgrpo.rewards.vqa_score import VqaScore

PROMPTS = ["a red cube", "two dogs", "a cat on a mat , sleeping", "two dogs", "a blue ball"]


def pictures(count: int, seed: int = 0) -> torch.Tensor:
    levels = torch.randint(0, 256, (count, 3, 16, 16), generator=torch.Generator().manual_seed(seed))
    return levels.float() / 255


def normalised(images: torch.Tensor) -> torch.Tensor:
    """Pictures that have the model's size already."""
    return (images.double() - torch.tensor(MEAN)[:, None, None].double()) / torch.tensor(
        DEVIATION)[:, None, None].double()


def word_tokenizer(template: str, marks: list[str], words: list[str]):
    """A tokenizer of whole words; the marks first, the one at 0 pads."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = {word: i for i, word in enumerate([*marks, *words])}
    core = Tokenizer(models.WordLevel(known, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    used = [(mark, known[mark]) for mark in marks if mark in template.split()]
    core.post_processor = processors.TemplateProcessing(template, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=marks[0], unk_token="?")


WORDS = sorted({word for prompt in PROMPTS for word in prompt.split()})


# --- ImageReward -----------------------------------------------------------------------------------------------------

WIDE, NARROW, HEADS = 24, 16, 2  # of the vision transformer, of the text encoder
TINY_VISION = {"hidden_size": WIDE, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS,
               "image_size": 16, "patch_size": 8}
TINY_TEXT = {"vocab_size": 40, "hidden_size": NARROW, "intermediate_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": HEADS, "max_position_embeddings": 35}


def released() -> dict[str, torch.Tensor]:
    """A random checkpoint under the release's names, with tensors that only its training needed."""
    made = torch.Generator().manual_seed(11)
    state = {}

    def linear(name: str, out: int, into: int) -> None:
        state[f"{name}.weight"] = torch.randn(out, into, generator=made) * into ** -0.5
        state[f"{name}.bias"] = torch.randn(out, generator=made) * 0.3

    def norm(name: str, width: int) -> None:
        state[f"{name}.weight"] = 1 + 0.3 * torch.randn(width, generator=made)
        state[f"{name}.bias"] = 0.3 * torch.randn(width, generator=made)

    eye, text = "blip.visual_encoder", "blip.text_encoder"
    state[f"{eye}.cls_token"], state[f"{eye}.pos_embed"] = torch.randn(1, 1, WIDE), torch.randn(1, 5, WIDE)
    state[f"{eye}.patch_embed.proj.weight"] = torch.randn(WIDE, 3, 8, 8, generator=made) * 0.05
    state[f"{eye}.patch_embed.proj.bias"] = torch.randn(WIDE, generator=made)
    for i in range(2):
        for name, out, into in (("attn.qkv", 3 * WIDE, WIDE), ("attn.proj", WIDE, WIDE), ("mlp.fc1", 48, WIDE),
                                ("mlp.fc2", WIDE, 48)):
            linear(f"{eye}.blocks.{i}.{name}", out, into)
        norm(f"{eye}.blocks.{i}.norm1", WIDE), norm(f"{eye}.blocks.{i}.norm2", WIDE)
    norm(f"{eye}.norm", WIDE)
    state[f"{text}.embeddings.position_ids"] = torch.arange(35)[None]
    state[f"{text}.embeddings.word_embeddings.weight"] = torch.randn(40, NARROW, generator=made)
    state[f"{text}.embeddings.position_embeddings.weight"] = torch.randn(35, NARROW, generator=made)
    norm(f"{text}.embeddings.LayerNorm", NARROW)
    for i in range(2):
        layer = f"{text}.encoder.layer.{i}"
        for kind, into in (("attention", NARROW), ("crossattention", WIDE)):
            linear(f"{layer}.{kind}.self.query", NARROW, NARROW)
            linear(f"{layer}.{kind}.self.key", NARROW, into), linear(f"{layer}.{kind}.self.value", NARROW, into)
            linear(f"{layer}.{kind}.output.dense", NARROW, NARROW), norm(f"{layer}.{kind}.output.LayerNorm", NARROW)
        linear(f"{layer}.intermediate.dense", 32, NARROW), linear(f"{layer}.output.dense", NARROW, 32)
        norm(f"{layer}.output.LayerNorm", NARROW)
    widths = (NARROW, 1024, 128, 64, 16, 1)
    for layer, into, out in zip((0, 2, 4, 6, 7), widths, widths[1:]):
        linear(f"mlp.layers.{layer}", out, into)
    state |= {"blip.visual_encoder_m.norm.weight": torch.ones(WIDE), "blip.text_decoder.cls.bias": torch.ones(3),
              "blip.image_queue": torch.ones(4, 2), "blip.temp": torch.ones(())}
    return state


def written_out(state: dict[str, torch.Tensor], picture: torch.Tensor, ids: list[int]) -> float:
    """ImageReward of one picture and prompt, in float64, from the release's tensors; no padding."""
    of = {key: value.double() for key, value in state.items()}

    def linear(x, name):
        return x @ of[f"{name}.weight"].T + of[f"{name}.bias"]

    def norm(x, name, eps):
        return layer_norm(x, x.shape[-1:], of[f"{name}.weight"], of[f"{name}.bias"], eps)

    def attended(query, key, value):
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(0, 1) for part in (query, key, value)]
        weights = (heads[0] @ heads[1].mT / heads[0].shape[-1] ** 0.5).softmax(-1)
        return (weights @ heads[2]).transpose(0, 1).flatten(1)

    eye, text = "blip.visual_encoder", "blip.text_encoder"
    patches = normalised(picture).unfold(1, 8, 8).unfold(2, 8, 8).permute(1, 2, 0, 3, 4).reshape(4, -1)
    x = patches @ of[f"{eye}.patch_embed.proj.weight"].flatten(1).T + of[f"{eye}.patch_embed.proj.bias"]
    x = torch.cat([of[f"{eye}.cls_token"][0], x]) + of[f"{eye}.pos_embed"][0]
    for i in range(2):
        block = f"{eye}.blocks.{i}"
        qkv = linear(norm(x, f"{block}.norm1", 1e-6), f"{block}.attn.qkv")
        x = x + linear(attended(*qkv.chunk(3, -1)), f"{block}.attn.proj")
        x = x + linear(gelu(linear(norm(x, f"{block}.norm2", 1e-6), f"{block}.mlp.fc1")), f"{block}.mlp.fc2")
    seen = norm(x, f"{eye}.norm", 1e-6)
    y = of[f"{text}.embeddings.word_embeddings.weight"][ids]
    y = norm(y + of[f"{text}.embeddings.position_embeddings.weight"][:len(ids)], f"{text}.embeddings.LayerNorm", 1e-12)
    for i in range(2):
        layer = f"{text}.encoder.layer.{i}"
        for kind, other in (("attention", None), ("crossattention", seen)):
            of_what = y if other is None else other
            mixed = attended(linear(y, f"{layer}.{kind}.self.query"), linear(of_what, f"{layer}.{kind}.self.key"),
                             linear(of_what, f"{layer}.{kind}.self.value"))
            y = norm(y + linear(mixed, f"{layer}.{kind}.output.dense"), f"{layer}.{kind}.output.LayerNorm", 1e-12)
        inner = linear(gelu(linear(y, f"{layer}.intermediate.dense")), f"{layer}.output.dense")
        y = norm(y + inner, f"{layer}.output.LayerNorm", 1e-12)
    value = y[0]
    for i in (0, 2, 4, 6, 7):
        value = linear(value, f"mlp.layers.{i}")
    return (value.item() - 0.16717362830052426) / 1.0333394966054072


@pytest.fixture(scope="module")
def bert():
    return word_tokenizer("[CLS] $A [SEP]", ["[PAD]", "[CLS]", "[SEP]", "?"], WORDS)


def tiny_network(state: dict[str, torch.Tensor]) -> torch.nn.ModuleDict:
    parts = image_reward.network(TINY_VISION, TINY_TEXT)
    parts.load_state_dict(image_reward.renamed(state))
    return parts


@pytest.mark.parametrize("batch", [1, 2, 32])
def test_image_reward_is_the_network_written_out(bert, batch):
    state, images = released(), pictures(5)
    expected = [written_out(state, image, bert(prompt)["input_ids"]) for image, prompt in zip(images, PROMPTS)]
    reward = ImageReward(device="cpu", batch_size=batch, parts=(tiny_network(state), bert))
    assert reward(images, PROMPTS).tolist() == pytest.approx(expected, abs=1e-4) and np.std(expected) > 0.01


def test_image_reward_sees_picture_and_prompt(bert):
    reward = ImageReward(device="cpu", parts=(tiny_network(released()), bert))
    images = pictures(2)
    same, other = reward(images, ["two dogs", "two dogs"]), reward(images, ["a cat", "two dogs"])
    assert same[1] == pytest.approx(other[1].item(), abs=1e-6)
    assert abs(same[0] - same[1]) > 1e-4 and abs(same[0] - other[0]) > 1e-4


def test_image_reward_in_bf16_is_near_that_in_fp32(bert):
    images, state = pictures(5), released()
    networks = [tiny_network(state) for _ in range(2)]
    half, full = (ImageReward(dtype=dtype, device="cpu", parts=(network, bert))(images, PROMPTS)
                  for dtype, network in zip(("bf16", "fp32"), networks))
    assert 0 < (half - full).abs().max() < 0.05 and networks[0]["head"][0].weight.dtype == torch.float32


def test_image_reward_cuts_prompts_at_35_tokens(bert):
    reward = ImageReward(device="cpu", parts=(tiny_network(released()), bert))
    long = " ".join(["dogs"] * 33)  # 33 words and two marks
    values = reward(pictures(1).expand(2, -1, -1, -1), [long, long + " cat on a mat"])
    assert values[0] == pytest.approx(values[1].item(), abs=1e-6)


def test_the_released_network_has_the_names_and_shapes_of_the_checkpoint():
    with torch.device("meta"):
        shapes = {key: tuple(value.shape) for key, value in image_reward.network().state_dict().items()}
    assert shapes["vision.embeddings.position_embedding"] == (1, 197, 1024)
    assert shapes["vision.encoder.layers.23.self_attn.qkv.weight"] == (3072, 1024)
    assert shapes["text.encoder.layer.11.crossattention.self.key.weight"] == (768, 1024)
    assert shapes["text.embeddings.word_embeddings.weight"] == (30524, 768)
    assert set(image_reward.renamed(released())) == set(tiny_network(released()).state_dict())


def test_another_checkpoint_is_refused(tmp_path):
    state = released()
    state["mlp.layers.7.weight"] = torch.zeros(2, 16)
    with pytest.raises(UserError, match="x.pt cannot be loaded .*give the checkpoint that was made for this reward"):
        local_model.fill("imagereward", image_reward.network(TINY_VISION, TINY_TEXT), image_reward.renamed(state),
                         "x.pt")


# --- VQAScore --------------------------------------------------------------------------------------------------------

QUESTION = "is this {} ? yes or no"


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
        for name, value in model.named_parameters():  # so that pictures and questions weigh in the answer
            if value.ndim > 1:
                value.normal_(0, 0.5)
    return model.eval(), texts, queries


def answered(model, texts, queries, image: torch.Tensor, prompt: str, answer: str) -> float:
    """One picture: transformers' own forward with placeholders for the picture; one token of the answer at a time."""
    question = QUESTION.replace("{}", prompt)
    ids = torch.tensor([[39] * 3 + texts(question)["input_ids"]])
    asked = torch.tensor([queries(question)["input_ids"]])
    wanted, product = texts(answer)["input_ids"], 1.0
    for i, token in enumerate(wanted):
        with torch.no_grad():
            logits = model(pixel_values=normalised(image)[None].float(), input_ids=ids, qformer_input_ids=asked,
                           decoder_input_ids=torch.tensor([[0, *wanted[:i]]])).logits
        product *= torch.softmax(logits[0, -1].double(), -1)[token].item()
    return product ** (1 / len(wanted))


@pytest.mark.parametrize("batch, answer", [(1, "yes"), (2, "yes"), (32, "yes"), (32, "no or yes")])
def test_vqa_score_is_the_probability_of_the_answer(answering, batch, answer):
    images = pictures(5, seed=1)
    expected = [answered(*answering, image, prompt, answer) for image, prompt in zip(images, PROMPTS)]
    reward = VqaScore(question=QUESTION, answer=answer, dtype="fp32", device="cpu", batch_size=batch, parts=answering)
    found = reward(images, PROMPTS)
    assert found.tolist() == pytest.approx(expected, rel=1e-4)
    assert np.std(expected) / np.mean(expected) > 0.01 and 0 < found.min() and found.max() < 1


def test_a_prompt_with_braces_is_asked_as_it_is(answering):
    reward = VqaScore(question=QUESTION, dtype="fp32", device="cpu", parts=answering)
    assert reward(pictures(1), ["a {cube} of {}"]).shape == (1,)


@pytest.mark.parametrize("name, arguments, told", [
    ("imagereward", {"checkpoint": "/no/ImageReward.pt"}, "/no/ImageReward.pt cannot be loaded .*: fetch it and give"),
    ("vqascore", {"model": "/no/folder"}, "/no/folder cannot be loaded .*: fetch it and give its folder as args"),
    ("vqascore", {"question": "Is it so?"}, "question is 'Is it so.', expected one with {} for the prompt"),
    ("vqascore", {"dtype": "int8"}, "dtype is 'int8', expected fp32, bf16, fp16"),
])
def test_mistakes_are_told_in_one_line(name, arguments, told):
    with pytest.raises(UserError, match=told) as error:
        find(name, arguments)
    assert "\n" not in str(error.value) and name in str(error.value)


def test_a_model_that_only_decodes_is_refused(answering):
    class Decoder:
        config = type("Config", (), {"use_decoder_only_language_model": True})

    with pytest.raises(UserError, match="no InstructBLIP on an encoder-decoder"):
        VqaScore(parts=(Decoder(), *answering[1:]))
