"""ImageReward and VQAScore on a tiny random BLIP, against the network written out, one image at a time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from flowgrpo.rewards import image_reward, local_model
from flowgrpo.rewards.image_reward import ImageReward
from flowgrpo.rewards.vqa_score import VqaScore
from tests.helpers import tiny_blip
from tests.helpers.refusals import message, refused
from tests.helpers.tiny_blip import HEADS, PROMPTS, QUESTION, normalised, pictures, released, tiny_network


def written_out(state: dict[str, torch.Tensor], picture: torch.Tensor, ids: list[int]) -> float:
    """ImageReward of one image and prompt, in float64, from the release's tensors; no padding."""
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


@pytest.mark.parametrize("batch", [1, 2, 32])
def test_image_reward_is_the_network_written_out(bert, batch):
    state, images = released(), pictures(5)
    expected = [written_out(state, image, bert(prompt)["input_ids"]) for image, prompt in zip(images, PROMPTS)]
    reward = ImageReward(device="cpu", batch_size=batch, parts=(tiny_network(state), bert))
    assert reward(images, PROMPTS).tolist() == pytest.approx(expected, abs=1e-4) and np.std(expected) > 0.01


def test_image_reward_reads_both_in_bf16_and_cuts_prompts(bert):
    reward = ImageReward(device="cpu", parts=(tiny_network(released()), bert))
    images = pictures(2)
    same, other = reward(images, ["two dogs", "two dogs"]), reward(images, ["a cat", "two dogs"])
    assert same[1] == pytest.approx(other[1].item(), abs=1e-6)
    assert abs(same[0] - same[1]) > 1e-4 and abs(same[0] - other[0]) > 1e-4
    images, state = pictures(5), released()
    networks = [tiny_network(state) for _ in range(2)]
    half, full = (ImageReward(dtype=dtype, device="cpu", parts=(network, bert))(images, PROMPTS)
                  for dtype, network in zip(("bf16", "fp32"), networks))
    assert 0 < (half - full).abs().max() < 0.05 and networks[0]["head"][0].weight.dtype == torch.float32
    long = " ".join(["dogs"] * 33)  # 33 words and two marks
    values = reward(pictures(1).expand(2, -1, -1, -1), [long, long + " cat on a mat"])
    # In fp32 the rows of one batch may be summed in another order.
    assert values[0] == pytest.approx(values[1].item(), abs=1e-5)


def test_the_checkpoint_has_its_names_and_another_is_refused(tmp_path):
    with torch.device("meta"):
        shapes = {key: tuple(value.shape) for key, value in image_reward.network().state_dict().items()}
    assert shapes["vision.embeddings.position_embedding"] == (1, 197, 1024)
    assert shapes["vision.encoder.layers.23.self_attn.qkv.weight"] == (3072, 1024)
    assert shapes["text.encoder.layer.11.crossattention.self.key.weight"] == (768, 1024)
    assert shapes["text.embeddings.word_embeddings.weight"] == (30524, 768)
    assert set(image_reward.rename_tensors(released())) == set(tiny_network(released()).state_dict())
    state = released()
    state["mlp.layers.7.weight"] = torch.zeros(2, 16)
    refused("x.pt cannot be loaded .*give the checkpoint that was made for this reward", local_model.fill,
            "imagereward", image_reward.network(tiny_blip.TINY_VISION, tiny_blip.TINY_TEXT),
            image_reward.rename_tensors(state), "x.pt")


def answered(model, texts, queries, image: torch.Tensor, prompt: str, answer: str) -> float:
    """One image: transformers' own forward with placeholders for the image; one token of the answer at a time."""
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


def test_braces_and_decoders(answering):
    reward = VqaScore(question=QUESTION, dtype="fp32", device="cpu", parts=answering)
    assert reward(pictures(1), ["a {cube} of {}"]).shape == (1,)
    decoder = SimpleNamespace(config=SimpleNamespace(use_decoder_only_language_model=True))
    assert "no InstructBLIP on an encoder-decoder" in message(VqaScore, parts=(decoder, *answering[1:]))
