"""Rewards that hold a CLIP model, on tiny random ones: against computations of their own, one picture at a time."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import sys

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file
from torchvision import transforms

from flowgrpo.errors import UserError
from flowgrpo.log import unlogged
from flowgrpo.rewards import aesthetic, local_model
from flowgrpo.rewards.about import lazily
from flowgrpo.rewards.aesthetic import Aesthetic
from flowgrpo.rewards.clip import ClipCosine, ClipScore
from flowgrpo.rewards.find import find
from flowgrpo.rewards.guards import Diversity
from flowgrpo.rewards.hpsv2 import HpsV2
from flowgrpo.rewards.pickscore import PickScore
from flowgrpo.rewards.preprocessing import DEVIATION, MEAN, Preparation, resized
from flowgrpo.rewards.score import score

PROMPTS = ["a red cube", "two dogs", "a cat on a mat , sleeping", "two dogs", "a blue ball"]
LEVEL = 1.01 / 255 / min(DEVIATION)  # one step of 8 bits, normalised


def pictures(count: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    """Smooth shapes with sharp edges, so that bicubic scaling overshoots, in whole 8-bit levels."""
    made = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 5, 4, generator=made)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    smooth[..., height // 3:height // 2, width // 4:] = (smooth[..., :1, :1] > 0.5).float()
    return (smooth * 255).round() / 255


def as_pil(picture: torch.Tensor) -> Image.Image:
    return Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy())


def by_pil(picture: torch.Tensor, size: int, *fitted) -> torch.Tensor:
    """The published preparation: torchvision on a PIL picture."""
    fitted = fitted or (transforms.Resize(size, transforms.InterpolationMode.BICUBIC), transforms.CenterCrop(size))
    whole = transforms.Compose([*fitted, transforms.ToTensor(), transforms.Normalize(MEAN, DEVIATION)])
    return whole(as_pil(picture))


def padded(size: int):
    """HPSv2's fitting by PIL: the longer side to `size`, pasted into the middle of a black square."""
    def fit(picture: Image.Image) -> Image.Image:
        scale = size / max(picture.size)
        small = picture.resize([round(side * scale) for side in picture.size], Image.BICUBIC)
        square = Image.new("RGB", (size, size))
        square.paste(small, ((size - small.width) // 2, (size - small.height) // 2))
        return square
    return fit


# --- preparation -----------------------------------------------------------------------------------------------------

SIDES = [(64, 64), (48, 80), (81, 50), (20, 20), (32, 47), (17, 30), (32, 32)]


@pytest.mark.parametrize("height, width", SIDES)
def test_pictures_are_prepared_as_by_pil(height, width):
    batch = pictures(3, height, width)
    expected = torch.stack([by_pil(picture, 32) for picture in batch])
    prepared = Preparation(32)(batch)
    assert prepared.shape == (3, 3, 32, 32)
    assert (prepared - expected).abs().max() <= LEVEL
    assert (prepared - expected).abs().mean() < LEVEL / 20


@pytest.mark.parametrize("height, width", SIDES)
def test_whole_pictures_are_padded_as_by_pil(height, width):
    batch = pictures(2, height, width)
    expected = torch.stack([by_pil(picture, 32, padded(32)) for picture in batch])
    prepared = Preparation(32, "longest")(batch)
    assert (prepared - expected).abs().max() <= LEVEL and (prepared - expected).abs().mean() < LEVEL / 20


def test_squashed_pictures_are_scaled_as_by_pil():
    batch = pictures(2, 40, 70)
    squash = transforms.Resize((32, 32), transforms.InterpolationMode.BICUBIC)
    expected = torch.stack([by_pil(picture, 32, squash) for picture in batch])
    assert (Preparation(32, "squash")(batch) - expected).abs().max() <= LEVEL


def test_scaling_does_not_leave_the_range_of_colours():
    levels = resized(pictures(4, 100, 90), (30, 27))
    assert levels.min() >= 0 and levels.max() <= 255 and torch.equal(levels, levels.round())


def test_other_means_and_deviations():
    grey = torch.full((1, 3, 8, 8), 0.6)
    prepared = Preparation(8, mean=(0.5, 0.4, 0.2), deviation=(0.1, 0.2, 0.5))(grey)
    assert prepared[0, :, 3, 3].tolist() == pytest.approx([1, 1, 0.8], abs=1e-6)


def test_the_perceptron_has_no_activations_and_the_numbers_of_its_checkpoints():
    head = aesthetic.perceptron(6)
    assert list(head.state_dict()) == [f"{i}.{kind}" for i in (0, 2, 4, 6, 7) for kind in ("weight", "bias")]
    one, two = torch.randn(2, 6), torch.randn(2, 6)
    zero = head(torch.zeros(1, 6))
    assert torch.allclose(head(one + two), head(one) + head(two) - zero, atol=1e-6)  # affine


# --- open_clip -------------------------------------------------------------------------------------------------------

TINY = {"embed_dim": 16, "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}}


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


def one_by_one(model, tokenizer, prepared: list[torch.Tensor], prompts: list[str]) -> torch.Tensor:
    """Cosines in float64 with norms written out, each pair alone."""
    cosines = []
    with torch.no_grad():
        for picture, prompt in zip(prepared, prompts):
            a, b = model.encode_image(picture[None])[0].double(), model.encode_text(tokenizer([prompt]))[0].double()
            cosines.append((a @ b / a.square().sum().sqrt() / b.square().sum().sqrt()))
    return torch.stack(cosines)


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


def test_hps_v2_is_the_cosine_of_the_whole_picture(tiny):
    model, tokenizer, file = tiny
    images = pictures(5, 44, 90)
    expected = one_by_one(model, tokenizer, [by_pil(image, 32, padded(32)) for image in images], PROMPTS)
    reward = HpsV2(file, model="tiny-clip-of-tests", device="cpu", batch_size=2)
    assert torch.allclose(reward(images, PROMPTS).double(), expected, atol=2e-3)  # of one 8-bit step here and there
    assert expected.std() > 0.01
    ready = HpsV2(device="cpu", parts=(model, tokenizer))
    assert torch.allclose(ready(images, PROMPTS), reward(images, PROMPTS), atol=1e-6)


def test_the_published_model_and_prefix_of_clip_score_are_the_defaults():
    given = {entry.name: entry.default for entry in dataclasses.fields(ClipScore)}
    assert [given[key] for key in ("model", "pretrained", "score", "prefix")] == [
        "ViT-B-32-quickgelu", "openai", "clipscore", "A photo depicts "]
    cosine = {entry.name: entry.default for entry in dataclasses.fields(ClipCosine)}
    assert [cosine[key] for key in ("model", "score", "prefix")] == ["ViT-L-14-quickgelu", "cosine", ""]


def test_both_versions_of_hps_v2_have_their_names(tiny):
    model, tokenizer, file = tiny
    images, options = pictures(2, 44, 90), {"model": "tiny-clip-of-tests", "device": "cpu"}
    one, two = (find(name, {"checkpoint": file, **options}) for name in ("hpsv2.0", "hpsv2.1"))
    assert torch.equal(one(images, PROMPTS[:2]), two(images, PROMPTS[:2]))
    with lazily():
        assert [find(name).checkpoint for name in ("hpsv2.0", "hpsv2.1")] == [
            "xswu/HPSv2/HPS_v2_compressed.pt", "xswu/HPSv2/HPS_v2.1_compressed.pt"]


@pytest.mark.parametrize("height, width", [(44, 90), (90, 64)])
def test_the_scaling_of_old_tables_has_no_filter(tiny, height, width):
    """The release's transform on a float tensor, as torchvision before 0.17 ran it."""
    images = pictures(2, height, width)
    scale = 32 / max(height, width)
    sides = [round(height * scale), round(width * scale)]
    small = transforms.functional.resize(images, sides, transforms.InterpolationMode.BICUBIC, antialias=False)
    left, top = 32 - sides[1], 32 - sides[0]
    square = torch.nn.functional.pad(small, (left // 2, left - left // 2, top // 2, top - top // 2))
    expected = transforms.functional.normalize(square, MEAN, DEVIATION)
    reward = HpsV2(device="cpu", parts=tiny[:2], antialias=False)
    torch.testing.assert_close(reward.prepare(images), expected, atol=1e-5, rtol=0)
    assert (expected - HpsV2(device="cpu", parts=tiny[:2]).prepare(images)).abs().max() > 20 * LEVEL


# --- PickScore -------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def pick(tmp_path_factory):
    """A tiny CLIP of transformers and a tokenizer, both as folders."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "?", *sorted({word for prompt in PROMPTS for word in prompt.split()}), "</s>"]
    end = len(words) - 1
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", end)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
                                        unk_token="?")
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**layers, "vocab_size": len(words), "max_position_embeddings": 12, "bos_token_id": 1,
                     "eos_token_id": end, "pad_token_id": 0, "projection_dim": 8, "initializer_range": 0.2},
        vision_config={**layers, "image_size": 32, "patch_size": 8, "projection_dim": 8, "initializer_range": 0.2},
        projection_dim=8, logit_scale_init_value=1.7)
    torch.manual_seed(5)
    model, folder = CLIPModel(config).eval(), tmp_path_factory.mktemp("pick")
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return model, tokenizer, str(folder)


def pick_expected(model, tokenizer, images, prompts) -> list[float]:
    scores = []
    with torch.no_grad():
        for image, prompt in zip(images, prompts):
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])  # alone, so without padding
            text = model.text_projection(model.text_model(input_ids=ids).last_hidden_state[0, ids.shape[1] - 1])
            shown = model.visual_projection(model.vision_model(pixel_values=by_pil(image, 32)[None]).pooler_output)[0]
            scores.append(np.exp(1.7) * torch.cosine_similarity(text, shown, dim=0).item())
    return scores


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_pick_score_is_the_scaled_cosine(pick, batch):
    model, tokenizer, folder = pick
    images = pictures(5, 32, 32, seed=1)
    expected = pick_expected(model, tokenizer, images, PROMPTS)
    reward = PickScore(folder, tokenizer=folder, device="cpu", batch_size=batch)
    assert reward(images, PROMPTS).tolist() == pytest.approx(expected, abs=1e-4) and np.std(expected) > 0.05
    trained = PickScore(divide=26, device="cpu", parts=(model, tokenizer))
    assert trained(images, PROMPTS).tolist() == pytest.approx([value / 26 for value in expected], abs=1e-5)


def test_pick_score_cuts_long_prompts(pick):
    model, tokenizer, _ = pick
    long = " ".join(["two dogs"] * 40)
    [value] = PickScore(device="cpu", parts=(model, tokenizer))(pictures(1, 32, 32), [long]).tolist()
    assert np.isfinite(value)


# --- aesthetic -------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def encoder(pick):
    from transformers import CLIPVisionModelWithProjection

    return CLIPVisionModelWithProjection.from_pretrained(pick[2]).eval()


def embeddings(encoder, images) -> np.ndarray:
    """Normalised embeddings, one picture at a time."""
    with torch.no_grad():
        embedded = torch.cat([encoder(pixel_values=by_pil(image, 32)[None]).image_embeds for image in images]).double()
    return (embedded / embedded.square().sum(1, keepdim=True).sqrt()).numpy()


@pytest.mark.parametrize("batch", [2, 32])
def test_the_perceptron_of_the_improved_predictor(pick, encoder, tmp_path, batch):
    torch.manual_seed(7)
    state = {f"layers.{key}": value for key, value in aesthetic.perceptron(8).state_dict().items()}
    state["layers.7.bias"] += 5
    torch.save(state, tmp_path / "head.pth")
    images = pictures(5, 32, 32, seed=2)
    values = embeddings(encoder, images)
    for layer in (0, 2, 4, 6, 7):
        weight, bias = (state[f"layers.{layer}.{kind}"].double().numpy() for kind in ("weight", "bias"))
        values = values @ weight.T + bias
    reward = Aesthetic(pick[2], head=str(tmp_path / "head.pth"), device="cpu", batch_size=batch)
    assert reward(images, [""] * 5).tolist() == pytest.approx(values[:, 0].tolist(), abs=1e-5)


def test_linear_heads(pick, encoder, tmp_path):
    state = {"weight": torch.randn(1, 8), "bias": torch.tensor([4.0])}
    save_file(state, tmp_path / "linear.safetensors")
    images = pictures(3, 32, 32, seed=4)
    expected = embeddings(encoder, images) @ state["weight"].double().numpy()[0] + 4
    reward = Aesthetic(pick[2], head=str(tmp_path / "linear.safetensors"), device="cpu")
    assert reward(images, [""] * 3).tolist() == pytest.approx(expected.tolist(), abs=1e-5) and np.std(expected) > 0.01


@pytest.mark.parametrize("state, line", [
    ({"weight": torch.zeros(1, 6), "bias": torch.zeros(1)}, "gives 8 numbers, but the head"),
    ({"first.weight": torch.zeros(1, 8)}, "has first.weight, expected the tensors of a perceptron"),
    ({"layers.0.weight": torch.zeros(1024, 8)}, "give the checkpoint that was made for this reward"),
])
def test_a_wrong_head_is_told(pick, tmp_path, state, line):
    save_file(state, tmp_path / "wrong.safetensors")
    with pytest.raises(UserError, match=line):
        Aesthetic(pick[2], head=str(tmp_path / "wrong.safetensors"), device="cpu")


# --- what a person may do wrong --------------------------------------------------------------------------------------

def test_nothing_but_tensors_is_unpickled(pick, tmp_path):
    torch.save({"weight": torch.nn.Linear(8, 1)}, tmp_path / "module.pth")
    with pytest.raises(UserError, match="module.pth cannot be loaded .*args: {head: FILE}"):
        Aesthetic(pick[2], head=str(tmp_path / "module.pth"), device="cpu")


def test_a_long_reason_is_cut_between_words():
    with pytest.raises(UserError, match=r"^weights cannot be loaded \(check your( \w+){29} \.\.\.\): fetch them$"), \
            local_model.loading("weights", "fetch them"):
        raise OSError("check your\n" + "link " * 40)


@pytest.mark.parametrize("name, arguments", [
    ("clip_score", {}), ("pickscore", {"model": "owner/name"}), ("safety", {"model": "owner/name"}),
    ("imagereward", {"checkpoint": "owner/name/file.pt"})])
def test_a_hub_that_does_not_answer_is_asked_once(name, arguments, monkeypatch, tmp_path, caplog):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"not in the hub's cache, and no network \(http://127.0.0.1:9 does not ans"):
        find(name, arguments)
    assert constants.HF_HUB_OFFLINE
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]  # of open_clip


@pytest.mark.parametrize("name, arguments, line", [
    ("clip_score", {"pretrained": "/no/weights.pt"}, "fetch|open_clip.list_pretrained"),
    ("clip_score", {"score": "cos"}, "score is 'cos', expected clipscore or cosine"),
    ("hpsv2.1", {"checkpoint": "/no/HPS.pt"}, "/no/HPS.pt cannot be loaded .no such file.: fetch it and give its path"),
    ("pickscore", {"model": "/no/folder"}, "/no/folder cannot be loaded .*: fetch it and give its folder as args"),
    ("pickscore", {"divide": 0}, "divide is 0, expected a number above 0"),
    ("aesthetic", {"head": "/no/head.pth"}, "/no/head.pth cannot be loaded .*: fetch it and give its path"),
    ("hpsv2.1", {"chekpoint": "x"}, "takes no argument 'chekpoint': did you mean 'checkpoint'?"),
])
def test_mistakes_are_told_in_one_line(name, arguments, line, caplog):
    with pytest.raises(UserError, match=line) as error:
        find(name, arguments)
    assert "\n" not in str(error.value) and name in str(error.value)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_errors_of_another_program_are_logged_while_a_model_is_loaded(caplog):
    with unlogged("open_clip"):
        logging.error("of another program")
    assert caplog.messages == ["of another program"]


@pytest.mark.parametrize("name", ["clip_score", "hpsv2.1"])
def test_a_missing_package_is_named_with_its_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(UserError, match=rf"reward '{name}' needs open_clip .*pip install 'flowgrpo\[clip\]'"):
        find(name)


def test_scores_in_bf16_are_near_those_in_fp32(tiny, pick, encoder):
    images, head = pictures(5, 40, 40), aesthetic.perceptron(8)
    for kind, parts in ((ClipScore, tiny[:2]), (HpsV2, tiny[:2]), (PickScore, pick[:2]), (Aesthetic, (encoder, head))):
        half, full = (kind(dtype=dtype, device="cpu", parts=copy.deepcopy(parts))(images, PROMPTS)
                      for dtype in ("bf16", "fp32"))
        assert half.dtype == torch.float32 and 0 < (half - full).abs().max() < 0.02 * full.abs().max() + 0.02, kind


def test_they_are_rewards_like_others(tiny, pick):
    images, metadata = pictures(5, 40, 40), [{}] * 5
    both = {"clip_score": ClipScore(device="cpu", parts=tiny[:2]),
            "pickscore": PickScore(device="cpu", parts=pick[:2])}
    columns = score(both, images, PROMPTS, metadata)
    assert columns.shape == (5, 2) and not columns.isnan().any()
    assert torch.equal(columns[:, 1], both["pickscore"](images, PROMPTS))
