"""Rewards of single images without a model, and the safety classifier."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from scipy import ndimage
from torchvision.utils import save_image

from flowgrpo import rewards
from flowgrpo.errors import UserError
from flowgrpo.rewards.guards import jpeg_compressibility, jpeg_incompressibility, sharpness
from flowgrpo.rewards.preprocessing import eight_bit, grey


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


def scored(reward, *lights: np.ndarray) -> list[float]:
    images = torch.stack([colour(light) for light in lights])
    return rewards.score({"it": reward}, images, [""] * len(lights), [{}] * len(lights))[:, 0].tolist()


# --- pixels ----------------------------------------------------------------------------------------------------------

def test_bytes_and_luminance():
    values = torch.tensor([-0.1, 0.0, 0.49 / 255, 0.51 / 255, 1.0, 1.2]).expand(1, 3, 1, 6)
    assert eight_bit(values)[0, 0, :, 1].tolist() == [0, 0, 0, 1, 255, 255]
    pixels = np.random.default_rng(0).integers(0, 256, (8, 9, 3), dtype=np.uint8)
    expected = np.array(Image.fromarray(pixels).convert("L")).astype(float)
    found = grey(torch.from_numpy(pixels).movedim(-1, 0) / 255).numpy() * 255
    assert found.shape == (8, 9) and np.abs(found - expected).max() < 1


# --- JPEG ------------------------------------------------------------------------------------------------------------

def test_the_size_is_that_of_a_file(tmp_path):
    picture = colour(landscape())
    save_image(picture, tmp_path / "picture.png")
    Image.open(tmp_path / "picture.png").save(tmp_path / "picture.jpg", quality=95)
    size = (tmp_path / "picture.jpg").stat().st_size / 1000
    assert jpeg_incompressibility(picture[None], [""]) == [size]
    assert jpeg_compressibility(picture[None], [""]) == [-size]


def test_noise_is_large_and_a_blur_is_small():
    pictures = spoilt()
    flat, blurred, clean, noisy = scored(jpeg_incompressibility, np.full((96, 96), 128.0), pictures["blurred"],
                                         pictures["clean"], pictures["noisy"])
    assert flat < blurred < clean < noisy


# --- sharpness -------------------------------------------------------------------------------------------------------

def test_sharpness_of_blurs_by_hand_and_by_scipy():
    # A checkerboard: the Laplacian is +4 on black and -4 on white, in equal numbers. Columns of which every other is
    # white: +2 and -2. A slope: 0.
    checkers = np.indices((6, 6)).sum(0) % 2 * 255.0
    columns = np.indices((6, 6))[1] % 2 * 255.0
    slope = np.indices((6, 6))[1] * 51.0
    assert scored(sharpness, checkers, columns, slope) == pytest.approx([16, 4, 0], abs=1e-5)
    light = landscape()
    expected = ndimage.laplace(light / 255)[1:-1, 1:-1].var()
    assert scored(sharpness, light) == pytest.approx([expected], rel=1e-5)
    pictures = spoilt()
    blurred, clean, noisy = scored(sharpness, *(pictures[name] for name in ("blurred", "clean", "noisy")))
    assert blurred < clean < noisy  # noise counts as sharp


@pytest.mark.parametrize("height, width", [(1, 1), (2, 9), (9, 2)])
def test_a_image_without_an_inside_has_no_sharpness(height, width):
    with pytest.raises(UserError, match=f"got images of {width} x {height} pixels, expected 3 x 3 or more"):
        scored(sharpness, np.zeros((height, width)))
