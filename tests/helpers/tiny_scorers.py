"""Tiny models of CLIP with pictures for them, prepared by PIL one at a time."""

from __future__ import annotations

import torch
from PIL import Image
from torchvision import transforms

from flowgrpo.rewards.preprocessing import DEVIATION, MEAN

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
