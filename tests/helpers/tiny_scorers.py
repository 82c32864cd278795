"""Tiny models of CLIP with images for them, prepared by PIL one at a time."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision import transforms
from transformers.image_transforms import center_crop

from flowgrpo.rewards.preprocessing import DEVIATION, MEAN

PROMPTS = ["a red cube", "two dogs", "a cat on a mat , sleeping", "two dogs", "a blue ball"]
DOCS = Path(__file__).parents[2] / "docs"
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


def drawings() -> list[torch.Tensor]:
    """Images of the documentation, with text and thin lines on white, [1, 3, H, W] of odd and even sizes."""
    files = {"before_after.png": (415, 1240), "rlg.png": (333, 517), "smollm2.png": (450, 301)}
    return [transforms.functional.to_tensor(Image.open(DOCS / "images" / name).convert("RGB"))[None, :, :height, :width]
            for name, (height, width) in files.items()]


def by_pil(picture: torch.Tensor, size: int, *fitted) -> torch.Tensor:
    """The published preparation: torchvision on a PIL image."""
    fitted = fitted or (transforms.Resize(size, transforms.InterpolationMode.BICUBIC), transforms.CenterCrop(size))
    whole = transforms.Compose([*fitted, transforms.ToTensor(), transforms.Normalize(MEAN, DEVIATION)])
    return whole(as_pil(picture))


def cropped_by_transformers(size: int):
    """The fitting of transformers' image processor of CLIP."""
    def crop(picture: Image.Image) -> Image.Image:
        return Image.fromarray(center_crop(np.asarray(picture), (size, size)))
    return transforms.Compose([transforms.Resize(size, transforms.InterpolationMode.BICUBIC), transforms.Lambda(crop)])


def released_by_hps_v2(picture: torch.Tensor, size: int, antialias: bool = True) -> torch.Tensor:
    """HPSv2's evaluation transform (its open_clip/transform.py): ToTensor, ResizeMaxSize, Normalize."""
    tensor = transforms.functional.to_tensor(as_pil(picture))
    scale = size / float(max(tensor.shape[1:]))
    sides = [round(side * scale) for side in tensor.shape[1:]]
    small = transforms.functional.resize(tensor, sides, transforms.InterpolationMode.BICUBIC, antialias=antialias)
    top, left = size - sides[0], size - sides[1]
    square = transforms.functional.pad(small, [left // 2, top // 2, left - left // 2, top - top // 2], fill=0)
    return transforms.functional.normalize(square, MEAN, DEVIATION)


def padded(size: int):
    """Whole images by PIL: the longer side to `size`, pasted into the middle of a black square."""
    def fit(picture: Image.Image) -> Image.Image:
        scale = size / max(picture.size)
        small = picture.resize([round(side * scale) for side in picture.size], Image.BICUBIC)
        square = Image.new("RGB", (size, size))
        square.paste(small, ((size - small.width) // 2, (size - small.height) // 2))
        return square
    return fit


TINY = {"embed_dim": 16, "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}}


def one_by_one(model, tokenizer, prepared: list[torch.Tensor], prompts: list[str]) -> torch.Tensor:
    """Cosines in float64 with norms written out, each pair alone."""
    cosines = []
    with torch.no_grad():
        for picture, prompt in zip(prepared, prompts):
            a, b = model.encode_image(picture[None])[0].double(), model.encode_text(tokenizer([prompt]))[0].double()
            cosines.append((a @ b / a.square().sum().sqrt() / b.square().sum().sqrt()))
    return torch.stack(cosines)
