"""CLIPScore, CLIP-I, PickScore, HPSv2 and aesthetic predictors on tiny random models, against own computations."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision.transforms.functional import to_tensor

from flowgrpo.data.prompts import load_prompts
from flowgrpo.rewards import clip
from flowgrpo.rewards.about import lazily
from flowgrpo.rewards.clip import Aesthetic, ClipCosine, ClipScore, HpsV2, PickScore, SubjectScore
from flowgrpo.rewards.find import find
from flowgrpo.rewards.guards import Diversity
from flowgrpo.rewards.preprocessing import DEVIATION, MEAN, Preparation
from flowgrpo.rewards.score import score
from tests.helpers import tiny_scorers
from tests.helpers.refusals import message, refused
from tests.helpers.tiny_scorers import LEVEL, PROMPTS, by_pil, drawings, one_by_one, pictures, released_by_hps_v2

cropped_to_32 = tiny_scorers.cropped_by_transformers(32)


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


def test_prefix_and_published_defaults_of_clip_score(tiny):
    model, tokenizer, _ = tiny
    images = pictures(2, 32, 32)
    prefixed = ClipScore(score="cosine", device="cpu", parts=(model, tokenizer))
    plain = ClipCosine(device="cpu", parts=(model, tokenizer))
    there = plain(images, ["A photo depicts a cat", "A photo depicts two dogs"])
    assert torch.equal(prefixed(images, ["a cat", "two dogs"]), there)
    given = {entry.name: entry.default for entry in dataclasses.fields(ClipScore)}
    assert [given[key] for key in ("model", "pretrained", "score", "prefix")] == [
        "ViT-B-32-quickgelu", "openai", "clipscore", "A photo depicts "]
    cosine = {entry.name: entry.default for entry in dataclasses.fields(ClipCosine)}
    assert [cosine[key] for key in ("model", "score", "prefix")] == ["ViT-L-14-quickgelu", "cosine", ""]


def test_clip_score_scales_images_as_its_model_wants_them(tiny, monkeypatch):
    model, tokenizer, _ = tiny
    settings = {"size": 32, "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic", "resize_mode": "squash"}
    monkeypatch.setattr(model.visual, "preprocess_cfg", settings)
    expected = Preparation(32, "squash", (0.5,) * 3, (0.5,) * 3)
    assert ClipScore(parts=(model, tokenizer)).prepare == expected
    monkeypatch.setitem(settings, "interpolation", "bilinear")
    assert "expected one that takes squares, scaled bicubic" in message(ClipScore, parts=(model, tokenizer))


@pytest.fixture(scope="module")
def model():
    from open_clip.model import CLIP
    torch.manual_seed(3)
    return CLIP(**tiny_scorers.TINY).eval()


def test_cosines_of_images_and_their_subjects(model, tmp_path):
    """Each prepared by PIL and embedded alone, in float64 with norms written out; a subject of another size."""
    shown, subjects = pictures(4, 40, 48), [pictures(1, 32, 32, seed=1)[0], pictures(1, 60, 44, seed=2)[0]]
    paths = [str(tmp_path / f"{i}.png") for i in range(2)]
    for path, subject in zip(paths, subjects):
        tiny_scorers.as_pil(subject).save(path)
    of = [0, 1, None, 0]
    def embedded(picture: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found = model.encode_image(by_pil(picture, 32)[None])[0].double()
        return found / found.square().sum().sqrt()
    reward = SubjectScore(device="cpu", batch_size=2, parts=(model, None))
    with torch.no_grad():
        found = reward(shown, ["a"] * 4, [{} if i is None else {"subject": paths[i]} for i in of])
    assert found[2] is None
    wanted = [embedded(shown[row]) @ embedded(subjects[i]) for row, i in enumerate(of) if i is not None]
    assert [value for value in found if value is not None] == pytest.approx([each.item() for each in wanted], abs=1e-3)
    assert max(wanted) - min(wanted) > 0.01
    itself = SubjectScore("chosen", device="cpu", parts=(model, None))
    with torch.no_grad():
        assert itself(subjects[0][None], ["a"], [{"chosen": paths[0]}]) == pytest.approx([1.0], abs=1e-6)


def test_a_prompts_image_is_a_subject_wherever_the_run_is(model, tmp_path, monkeypatch):
    for name, seed in (("a", 1), ("b", 2)):
        tiny_scorers.as_pil(pictures(1, 32, 32, seed=seed)[0]).save(tmp_path / f"{name}.png")
    (tmp_path / "prompts.csv").write_text("prompt,image\nred,a.png\nblue,b.png\n")
    monkeypatch.chdir(tmp_path)
    prompts = load_prompts("prompts.csv")
    monkeypatch.chdir("/")
    shown, reward = to_tensor(Image.open(tmp_path / "a.png")), SubjectScore("image", device="cpu", parts=(model, None))
    with torch.no_grad():
        found = score({"like": reward}, torch.stack([shown] * 2), ["red", "blue"], [p.metadata for p in prompts])
    assert found[0].item() == pytest.approx(1.0, abs=1e-6) and found[1].item() < 0.99


def test_weights_and_subjects_that_cannot_be_read(model, tmp_path):
    refused("^reward 'subject_score': ViT-B-32 with the weights /no/file cannot be loaded",
            SubjectScore, "subject", "ViT-B-32", "/no/file")
    refused("reward 'subject_score': .*none.png cannot be read as an image", SubjectScore(parts=(model, None)),
            torch.zeros(1, 3, 8, 8), ["a"], [{"subject": str(tmp_path / "none.png")}])


def test_hps_v2_is_the_cosine_under_both_names(tiny):
    model, tokenizer, file = tiny
    images = pictures(5, 44, 90)
    expected = one_by_one(model, tokenizer, [released_by_hps_v2(image, 32) for image in images], PROMPTS)
    reward = HpsV2(file, model="tiny-clip-of-tests", device="cpu", batch_size=2)
    assert torch.allclose(reward(images, PROMPTS).double(), expected, atol=1e-6)
    assert expected.std() > 0.01
    ready = HpsV2(device="cpu", parts=(model, tokenizer))
    assert torch.allclose(ready(images, PROMPTS), reward(images, PROMPTS), atol=1e-6)
    images, options = pictures(2, 44, 90), {"model": "tiny-clip-of-tests", "device": "cpu"}
    one, two = (find(name, {"checkpoint": file, **options}) for name in ("hpsv2.0", "hpsv2.1"))
    assert torch.equal(one(images, PROMPTS[:2]), two(images, PROMPTS[:2]))
    with lazily():
        assert [find(name).checkpoint for name in ("hpsv2.0", "hpsv2.1")] == [
            "xswu/HPSv2/HPS_v2_compressed.pt", "xswu/HPSv2/HPS_v2.1_compressed.pt"]


@pytest.mark.parametrize("antialias", [True, False])
def test_images_are_prepared_as_in_the_release(tiny, antialias):
    """antialias: as its transform is with torchvision from 0.17, and as it was before."""
    prepare = HpsV2(device="cpu", parts=tiny[:2], antialias=antialias).prepare
    expected = [released_by_hps_v2(image[0], 32, antialias) for image in drawings()]
    for image, one in zip(drawings(), expected):
        torch.testing.assert_close(prepare(image)[0], one, atol=1e-5, rtol=0)
    other = HpsV2(device="cpu", parts=tiny[:2], antialias=not antialias).prepare
    assert (other(drawings()[0])[0] - expected[0]).abs().max() > 20 * LEVEL


def test_edges_overshoot_as_in_the_release(tiny):
    white, black = ((1 - torch.tensor(MEAN)) / torch.tensor(DEVIATION), -torch.tensor(MEAN) / torch.tensor(DEVIATION))
    prepared = HpsV2(device="cpu", parts=tiny[:2]).prepare(pictures(2, 90, 64))
    assert (prepared > white[:, None, None] + LEVEL).any() and (prepared < black[:, None, None] - LEVEL).any()


def pick_expected(model, tokenizer, images, prompts) -> list[float]:
    scores = []
    with torch.no_grad():
        for image, prompt in zip(images, prompts):
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])  # alone, so without padding
            text = model.text_projection(model.text_model(input_ids=ids).last_hidden_state[0, ids.shape[1] - 1])
            seen = model.vision_model(pixel_values=by_pil(image, 32, cropped_to_32)[None]).pooler_output
            shown = model.visual_projection(seen)[0]
            scores.append(np.exp(1.7) * torch.cosine_similarity(text, shown, dim=0).item())
    return scores


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_pick_score_is_the_scaled_cosine(pick, batch):
    model, tokenizer, folder = pick
    images = pictures(5, 32, 67, seed=1)
    expected = pick_expected(model, tokenizer, images, PROMPTS)
    reward = PickScore(folder, tokenizer=folder, device="cpu", batch_size=batch)
    assert reward(images, PROMPTS).tolist() == pytest.approx(expected, abs=1e-4) and np.std(expected) > 0.05
    trained = PickScore(divide=26, device="cpu", parts=(model, tokenizer))
    assert trained(images, PROMPTS).tolist() == pytest.approx([value / 26 for value in expected], abs=1e-5)
    assert trained(images[:1], [" ".join(["two dogs"] * 40)]).isfinite().all()  # longer than the model reads


def test_the_perceptron_has_no_activations_and_the_numbers_of_its_checkpoints():
    head = clip.perceptron(6)
    assert list(head.state_dict()) == [f"{i}.{kind}" for i in (0, 2, 4, 6, 7) for kind in ("weight", "bias")]
    one, two = torch.randn(2, 6), torch.randn(2, 6)
    zero = head(torch.zeros(1, 6))
    assert torch.allclose(head(one + two), head(one) + head(two) - zero, atol=1e-6)  # affine


def embeddings(encoder, images) -> np.ndarray:
    """Normalised embeddings, one image at a time."""
    with torch.no_grad():
        embedded = torch.cat([encoder(pixel_values=by_pil(image, 32, cropped_to_32)[None]).image_embeds
                              for image in images]).double()
    return (embedded / embedded.square().sum(1, keepdim=True).sqrt()).numpy()


@pytest.mark.parametrize("batch", [2, 32])
def test_the_perceptron_of_the_improved_predictor(pick, encoder, tmp_path, batch):
    torch.manual_seed(7)
    state = {f"layers.{key}": value for key, value in clip.perceptron(8).state_dict().items()}
    state["layers.7.bias"] += 5
    torch.save(state, tmp_path / "head.pth")
    images = pictures(5, 32, 67, seed=2)
    values = embeddings(encoder, images)
    for layer in (0, 2, 4, 6, 7):
        weight, bias = (state[f"layers.{layer}.{kind}"].double().numpy() for kind in ("weight", "bias"))
        values = values @ weight.T + bias
    reward = Aesthetic(pick[2], head=str(tmp_path / "head.pth"), device="cpu", batch_size=batch)
    assert reward(images, [""] * 5).tolist() == pytest.approx(values[:, 0].tolist(), abs=1e-5)


def test_linear_heads(pick, encoder, tmp_path):
    file, state = tmp_path / "linear.safetensors", {"weight": torch.randn(1, 8), "bias": torch.tensor([4.0])}
    save_file(state, file)
    images = pictures(3, 32, 32, seed=4)
    expected = embeddings(encoder, images) @ state["weight"].double().numpy()[0] + 4
    reward = Aesthetic(pick[2], head=str(file), device="cpu")
    assert reward(images, [""] * 3).tolist() == pytest.approx(expected.tolist(), abs=1e-5) and np.std(expected) > 0.01
    for wrong, line in (
            ({"weight": torch.zeros(1, 6), "bias": torch.zeros(1)}, "gives 8 numbers, but the head"),
            ({"first.weight": torch.zeros(1, 8)}, "has first.weight, expected the tensors of a perceptron"),
            ({"layers.0.weight": torch.zeros(1024, 8)}, "give the checkpoint that was made for this reward")):
        save_file(wrong, file)
        refused(line, Aesthetic, pick[2], head=str(file), device="cpu")
