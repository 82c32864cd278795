"""Guards against hacking, the quality of single images, and the safety classifier."""

import colorsys
import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from scipy import ndimage
from torchvision.utils import save_image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from flowgrpo import rewards
from flowgrpo.rewards import guards
from flowgrpo.rewards.guards import jpeg_compressibility, jpeg_incompressibility, sharpness
from flowgrpo.rewards.preprocessing import eight_bit, grey
from tests.helpers.refusals import message, refused
from tests.helpers.tables import close, f64


def scored(name: str, images: torch.Tensor, group: int = 1, metadata=None, **args) -> list[float]:
    count = len(images)
    return rewards.score({name: rewards.find(name, args)}, images, [""] * count, metadata or [{}] * count,
                         group)[:, 0].tolist()


def flat(*levels: float, size: int = 32) -> torch.Tensor:
    return torch.tensor(levels, dtype=torch.float32)[:, None, None, None].expand(-1, 3, size, size)


# --- diversity -------------------------------------------------------------------------------------------------------
def test_distances_within_a_group():
    # A triangle of sides 3, 4, 5; and a group of equals. Groups do not see each other.
    features = f64([[[0, 0], [3, 0], [0, 4]], [[7, 7], [7, 7], [7, 7]]])
    close(guards.distances(features), [[3.5, 4, 4.5], [0, 0, 0]])
    found = scored("diversity", flat(0, 1, 0.25, 0.25), group=2)
    assert found == pytest.approx([1, 1, 0, 0], abs=1e-6)
    # 0, 1, 0.25, 0.25 as one group: (1 + 2 * 0.25) / 3, (1 + 2 * 0.75) / 3, (0.25 + 0.75) / 3.
    assert scored("diversity", flat(0, 1, 0.25, 0.25), group=4) == pytest.approx([0.5, 2.5 / 3, 1 / 3, 1 / 3], abs=1e-6)
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    apart = scored("diversity", images, group=4)
    images[3] = images[0]
    found = scored("diversity", images, group=4)
    assert found[0] == found[3] < apart[0] and sum(found) < sum(apart)


def test_files_and_weights_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text("def levels(images):\n    return 10 * images.mean((1, 2, 3))[:, None]\n")
    assert scored("diversity", flat(0, 1), group=2, features=f"{tmp_path}/mine.py:levels") == pytest.approx([10, 10])
    reward = guards.Diversity(lambda images: images[:, :1].mean((2, 3)))
    assert reward(flat(0, 0.5), ["", ""], [{}, {}], 2).tolist() == pytest.approx([0.5, 0.5])
    assert "reward 'diversity' compares the samples of a group" in message(lambda: scored("diversity", flat(0, 1)))
    picture = colour(landscape())
    save_image(picture, tmp_path / "picture.png")
    Image.open(tmp_path / "picture.png").save(tmp_path / "picture.jpg", quality=95)
    size = (tmp_path / "picture.jpg").stat().st_size / 1000
    assert jpeg_incompressibility(picture[None], [""]) == [size]
    assert jpeg_compressibility(picture[None], [""]) == [-size]


# --- the base model's image ----------------------------------------------------------------------------------------
def test_likeness_to_the_base_models_image(tmp_path):
    save_image(flat(0.2)[0], tmp_path / "base.png")  # 51 of 255
    save_image(flat(1.0, size=64)[0], tmp_path / "large.png")
    metadata = [{"base_image": f"{tmp_path}/base.png"}] * 2 + [{"base_image": f"{tmp_path}/large.png"}, {}]
    found = scored("base_similarity", flat(0.2, 0.7, 0.7, 0.7), metadata=metadata)
    assert found[:3] == pytest.approx([1, 0.5, 0.7], abs=1e-5) and math.isnan(found[3])
    refused("the base model's image .*gone.png cannot be read", scored, "base_similarity", flat(0.2),
            metadata=[{"base_image": f"{tmp_path}/gone.png"}])


# --- grids -----------------------------------------------------------------------------------------------------------
def explained(profile: np.ndarray, period: int) -> float:
    """Adjusted R^2 of a profile by its phase: the analysis of variance that the spectrum stands for."""
    phases = profile[:len(profile) // period * period].reshape(-1, period)
    within = ((phases - phases.mean(0))**2).sum() / (phases.size - period)
    return max(0.0, 1 - within / phases.var(ddof=1))


@pytest.mark.parametrize("period, length", [(16, 255), (8, 63), (7, 50), (16, 48), (2, 9), (3, 27)])
def test_the_spectrum_is_the_variance_that_the_phase_explains(period, length):
    rng = np.random.default_rng(length)
    for strength in (0, 0.5, 3):
        profile = rng.random(length) + strength * (np.arange(length) % period == 1)
        found = guards.periodic(torch.from_numpy(profile), period).item()
        assert found == pytest.approx(explained(profile, period), abs=1e-9)


def grids(*each: tuple[int, float, bool], size: int = 128) -> torch.Tensor:
    """Images with steps of brightness at every border of patches: their period, strength, and whether in rows too."""
    rough = ndimage.gaussian_filter(np.random.default_rng(3).normal(size=(size, size)), 2)
    images = []
    for period, strength, down in each:
        levels = np.random.default_rng(4).normal(size=(size // period, size // period)) * strength
        patches = levels.repeat(period, 0).repeat(period, 1)
        images.append(0.5 + 0.15 * rough / rough.std() + (patches if down else patches[:1].repeat(size, 0)))
    return torch.from_numpy(np.stack(images)).float()[:, None].expand(-1, 3, -1, -1)


def test_grids_at_their_period_and_strength():
    clean, both, columns, other = scored("grid_artefacts", grids((16, 0, True), (16, 0.2, True), (16, 0.2, False),
                                                                 (32, 0.2, True)))
    assert clean > -0.15 and both < -0.5 and columns < -0.5 and scored("grid_artefacts", flat(0.3, size=128)) == [0]
    assert other > both  # borders at every second place alone
    [seen_at_8] = scored("grid_artefacts", grids((8, 0.2, True)), period=8)
    assert seen_at_8 < -0.5
    found = scored("grid_artefacts", grids(*((16, strength, True) for strength in (0, 0.05, 0.1, 0.4))))
    assert found == sorted(found, reverse=True) and len(set(found)) == 4 and min(found) >= -1
    profiles = torch.rand(4000, 255, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = guards.periodic(profiles, 16)
    assert (found > 0).double().mean().item() == pytest.approx(0.45, abs=0.1) and found.mean() < 0.03
    assert "got images of [32, 32] pixels, expected at least 49, three" in message(scored, "grid_artefacts", flat(0.5))
    assert "period is 1, expected 2 pixels or more" in message(rewards.find, "grid_artefacts", {"period": 1})


# --- saturation ------------------------------------------------------------------------------------------------------
def test_colourfulness_and_its_limit():
    colours = [(1, 0, 0), (0.9, 0.1, 0.1), (0.85, 0.1, 0.1), (0.8, 0.1, 0.5), (0.5, 0.5, 0.5), (0.3, 0, 0)]
    images = torch.tensor(colours)[:, :, None, None].expand(-1, -1, 8, 8)
    # Beyond 0.7, over 0.3: 1 -> 1, 0.8 -> 1/3, 0.75 -> 1/6, 0.7 and less -> 0.
    assert scored("over_saturation", images) == pytest.approx([-1, -1 / 3, -1 / 6, 0, 0, 0], abs=1e-5)
    half = images[:1].clone()
    half[..., 4:] = 0.5
    assert scored("over_saturation", half) == pytest.approx([-0.5])
    pixels = torch.rand(50, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    expected = [-s * v for _, s, v in (colorsys.rgb_to_hsv(*pixel) for pixel in pixels.flatten(1).tolist())]
    assert scored("over_saturation", pixels, limit=0.0) == pytest.approx(expected, abs=1e-6)
    assert "limit is 1.0, expected from 0 to below 1" in message(rewards.find, "over_saturation", {"limit": 1.0})


def landscape(size: int = 96) -> np.ndarray:
    """An image with smooth parts, edges and texture, [H, W] from 0 to 255."""
    rng = np.random.default_rng(0)
    rough = ndimage.gaussian_filter(rng.normal(size=(size, size)), 1.2)
    down, across = np.mgrid[:size, :size] / size
    return np.clip(90 + 80 * (across > down) + 60 * rough / rough.std() * (down > 0.4) * 0.4, 0, 255).round()


def colour(light: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(light / 255).float().expand(3, -1, -1)


def spoilt() -> dict[str, np.ndarray]:
    clean = landscape()
    picture, rng = Image.fromarray(clean.astype(np.uint8)), np.random.default_rng(1)
    return {"clean": clean, "noisy": np.clip(clean + rng.normal(0, 40, clean.shape), 0, 255).round(),
            "blurred": np.array(picture.filter(ImageFilter.GaussianBlur(2))).astype(float)}


def scores_of(reward, *lights: np.ndarray) -> list[float]:
    images = torch.stack([colour(light) for light in lights])
    return rewards.score({"it": reward}, images, [""] * len(lights), [{}] * len(lights))[:, 0].tolist()


# --- pixels ----------------------------------------------------------------------------------------------------------
def test_sizes_of_bytes_noise_and_blur():
    values = torch.tensor([-0.1, 0.0, 0.49 / 255, 0.51 / 255, 1.0, 1.2]).expand(1, 3, 1, 6)
    assert eight_bit(values)[0, 0, :, 1].tolist() == [0, 0, 0, 1, 255, 255]
    pixels = np.random.default_rng(0).integers(0, 256, (8, 9, 3), dtype=np.uint8)
    expected = np.array(Image.fromarray(pixels).convert("L")).astype(float)
    found = grey(torch.from_numpy(pixels).movedim(-1, 0) / 255).numpy() * 255
    assert found.shape == (8, 9) and np.abs(found - expected).max() < 1
    pictures = spoilt()
    flat, blurred, clean, noisy = scores_of(jpeg_incompressibility, np.full((96, 96), 128.0), pictures["blurred"],
                                         pictures["clean"], pictures["noisy"])
    assert flat < blurred < clean < noisy


# --- sharpness -------------------------------------------------------------------------------------------------------
def test_sharpness_of_blurs_by_hand_and_by_scipy():
    # A checkerboard: the Laplacian is +4 on black and -4 on white, in equal numbers. Columns of which every other is
    # white: +2 and -2. A slope: 0.
    checkers = np.indices((6, 6)).sum(0) % 2 * 255.0
    columns = np.indices((6, 6))[1] % 2 * 255.0
    slope = np.indices((6, 6))[1] * 51.0
    assert scores_of(sharpness, checkers, columns, slope) == pytest.approx([16, 4, 0], abs=1e-5)
    light = landscape()
    expected = ndimage.laplace(light / 255)[1:-1, 1:-1].var()
    assert scores_of(sharpness, light) == pytest.approx([expected], rel=1e-5)
    pictures = spoilt()
    blurred, clean, noisy = scores_of(sharpness, *(pictures[name] for name in ("blurred", "clean", "noisy")))
    assert blurred < clean < noisy  # noise counts as sharp
    for height, width in ((1, 1), (2, 9), (9, 2)):
        assert f"got images of {width} x {height} pixels, expected 3 x 3 or more" in message(
            scores_of, sharpness, np.zeros((height, width)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16,
                       patch_size=8, id2label={0: "normal", 1: "nsfw"}, label2id={"normal": 0, "nsfw": 1},
                       initializer_range=0.5)
    path = tmp_path_factory.mktemp("classifier")
    ViTForImageClassification(config).save_pretrained(path)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(path)
    return str(path)


@pytest.mark.fast
def test_probabilities_of_safety_by_size_and_class(folder):
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():  # of its size already: only scaled to [-1, 1], of 256 steps
        model = ViTForImageClassification.from_pretrained(folder).eval()
        expected = model((images * 255).round() / 127.5 - 1).logits.softmax(-1)[:, 0]
    reward = rewards.find("safety", {"model": folder, "device": "cpu"})
    found = rewards.score({"safety": reward}, images, [""] * 3, [{}] * 3)[:, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert found.std() > 0.01
    # An image of one colour is the same at every size.
    shades = torch.rand(4, 3, 1, 1, generator=torch.Generator().manual_seed(2))
    small, large = (reward(shades.expand(-1, -1, side, side), [""] * 4) for side in (16, 50))
    torch.testing.assert_close(small, large, rtol=0, atol=1e-5)
    images = torch.rand(35, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(reward(images, [""] * 35)[32:], reward(images[32:], [""] * 3), rtol=0, atol=1e-6)
    both = rewards.find("safety", {"model": folder, "unsafe": ["NSFW", "normal"], "device": "cpu"})
    assert both(torch.rand(2, 3, 16, 16), [""] * 2).tolist() == pytest.approx([0, 0], abs=1e-6)
    refused("unsafe is porn, but the classes of .* are normal, nsfw", rewards.find, "safety",
            {"model": folder, "unsafe": ["porn"]})
