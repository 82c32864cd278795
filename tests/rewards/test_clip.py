"""CLIPScore, features of CLIP and CLIP-I on tiny random models, against computations of their own."""

import dataclasses

import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import to_tensor

from flowgrpo.data.prompts import load_prompts
from flowgrpo.errors import UserError
from flowgrpo.rewards.clip import ClipCosine, ClipScore, SubjectScore
from flowgrpo.rewards.guards import Diversity
from flowgrpo.rewards.preprocessing import Preparation
from flowgrpo.rewards.score import score
from tests.helpers.tiny_scorers import PROMPTS, TINY, by_pil, one_by_one, pictures


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


def test_clip_score_scales_images_as_its_model_wants_them(tiny, monkeypatch):
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


@pytest.fixture(scope="module")
def model():
    from open_clip.model import CLIP
    torch.manual_seed(3)
    return CLIP(**TINY).eval()


def saved(path, picture: torch.Tensor) -> str:
    Image.fromarray((picture.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()).save(path)
    return str(path)


def test_cosines_of_images_and_their_subjects(model, tmp_path):
    """Each prepared by PIL and embedded alone, in float64 with norms written out; a subject of another size."""
    shown, subjects = pictures(4, 40, 48), [pictures(1, 32, 32, seed=1)[0], pictures(1, 60, 44, seed=2)[0]]
    paths = [saved(tmp_path / f"{i}.png", subject) for i, subject in enumerate(subjects)]
    subjects = [to_tensor(Image.open(path)) for path in paths]
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
        saved(tmp_path / f"{name}.png", pictures(1, 32, 32, seed=seed)[0])
    (tmp_path / "prompts.csv").write_text("prompt,image\nred,a.png\nblue,b.png\n")
    monkeypatch.chdir(tmp_path)
    prompts = load_prompts("prompts.csv")
    monkeypatch.chdir("/")
    shown, reward = to_tensor(Image.open(tmp_path / "a.png")), SubjectScore("image", device="cpu", parts=(model, None))
    with torch.no_grad():
        found = score({"like": reward}, torch.stack([shown] * 2), ["red", "blue"], [p.metadata for p in prompts])
    assert found[0].item() == pytest.approx(1.0, abs=1e-6) and found[1].item() < 0.99


def test_weights_that_cannot_be_had_are_told_of_this_reward():
    with pytest.raises(UserError, match="^reward 'subject_score': ViT-B-32 with the weights /no/file cannot be loaded"):
        SubjectScore("subject", "ViT-B-32", "/no/file")


def test_a_subject_that_cannot_be_read_is_told(model, tmp_path):
    reward = SubjectScore(device="cpu", parts=(model, None))
    with pytest.raises(UserError, match="reward 'subject_score': .*none.png cannot be read as an image"):
        reward(torch.zeros(1, 3, 8, 8), ["a"], [{"subject": str(tmp_path / "none.png")}])
