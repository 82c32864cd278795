"""CLIP-I: the likeness of a picture to that of its subject, under a tiny model of open_clip."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import to_tensor

from flowgrpo.data.prompts import load_prompts
from flowgrpo.errors import UserError
from flowgrpo.rewards.clip import SubjectScore
from flowgrpo.rewards.score import score
from tests.helpers.tiny_scorers import TINY, by_pil, pictures


@pytest.fixture(scope="module")
def model():
    from open_clip.model import CLIP

    torch.manual_seed(3)
    return CLIP(**TINY).eval()


def saved(path, picture: torch.Tensor) -> str:
    Image.fromarray((picture.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()).save(path)
    return str(path)


def test_cosines_of_pictures_and_their_subjects(model, tmp_path):
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


def test_a_prompts_picture_is_a_subject_wherever_the_run_is(model, tmp_path, monkeypatch):
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
    with pytest.raises(UserError, match="reward 'subject_score': .*none.png cannot be read as a picture"):
        reward(torch.zeros(1, 3, 8, 8), ["a"], [{"subject": str(tmp_path / "none.png")}])
