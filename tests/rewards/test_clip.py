"""CLIPScore and features of CLIP on a tiny random model, against computations of their own, one picture at a time."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flowgrpo.errors import UserError
from flowgrpo.rewards.clip import ClipCosine, ClipScore
from flowgrpo.rewards.guards import Diversity
from flowgrpo.rewards.preprocessing import Preparation
from tests.helpers.tiny_scorers import PROMPTS, by_pil, one_by_one, pictures


@pytest.mark.parametrize("batch", [1, 2, 32])
def test_clip_score_is_the_scaled_cosine(tiny, batch):
    model, tokenizer, file = tiny
    images = pictures(5, 32, 32)
    expected = one_by_one(model, tokenizer, [by_pil(image, 32) for image in images], PROMPTS)
    cosine = ClipCosine("tiny-clip-of-tests", file, device="cpu", batch_size=batch)
    assert torch.allclose(cosine(images, PROMPTS).double(), expected, atol=1e-5) and expected.std() > 0.01
    clipped = ClipScore(prefix="", device="cpu", batch_size=batch, parts=(model, tokenizer))
    assert torch.allclose(clipped(images, PROMPTS).double(), 2.5 * expected.clamp(min=0), atol=1e-5)
    assert (expected < 0).any() and (expected > 0).any()  # both sides of the clip are seen


@pytest.mark.parametrize("batch", [2, 32])
def test_diversity_of_clips_features_is_the_distance_of_its_embeddings(tiny, batch):
    model, tokenizer, _ = tiny
    images = pictures(4, 32, 32)
    features = ClipScore(parts=(model, tokenizer), batch_size=batch, device="cpu").features
    with torch.no_grad():
        embedded = model.encode_image(torch.stack([by_pil(image, 32) for image in images]))
    unit = (embedded / embedded.norm(dim=1, keepdim=True)).double()
    apart = torch.stack([(unit[0] - unit[1]).norm(), (unit[2] - unit[3]).norm()]).repeat_interleave(2)
    assert torch.allclose(features(images).double(), unit, atol=1e-5) and apart.min() > 0.01
    assert torch.allclose(Diversity(features)(images, ["a"] * 4, [{}] * 4, 2), apart, atol=1e-5)


def test_clip_score_puts_its_prefix_first(tiny):
    model, tokenizer, _ = tiny
    images = pictures(2, 32, 32)
    prefixed = ClipScore(score="cosine", device="cpu", parts=(model, tokenizer))
    plain = ClipCosine(device="cpu", parts=(model, tokenizer))
    there = plain(images, ["A photo depicts a cat", "A photo depicts two dogs"])
    assert torch.equal(prefixed(images, ["a cat", "two dogs"]), there)


def test_clip_score_scales_pictures_as_its_model_wants_them(tiny, monkeypatch):
    model, tokenizer, _ = tiny
    settings = {"size": 32, "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic", "resize_mode": "squash"}
    monkeypatch.setattr(model.visual, "preprocess_cfg", settings)
    expected = Preparation(32, "squash", (0.5,) * 3, (0.5,) * 3)
    assert ClipScore(parts=(model, tokenizer)).prepare == expected
    monkeypatch.setitem(settings, "interpolation", "bilinear")
    with pytest.raises(UserError, match="expected one that takes squares, scaled bicubic"):
        ClipScore(parts=(model, tokenizer))


def test_the_published_model_and_prefix_of_clip_score_are_the_defaults():
    given = {entry.name: entry.default for entry in dataclasses.fields(ClipScore)}
    assert [given[key] for key in ("model", "pretrained", "score", "prefix")] == [
        "ViT-B-32-quickgelu", "openai", "clipscore", "A photo depicts "]
    cosine = {entry.name: entry.default for entry in dataclasses.fields(ClipCosine)}
    assert [cosine[key] for key in ("model", "score", "prefix")] == ["ViT-L-14-quickgelu", "cosine", ""]
