"""Images as vision models take them, and as numbers and bytes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

from flowgrpo.data.images import frames_of, stills
from flowgrpo.data.open_image import FLOATS, levels, open_checked, pages, require_single, rgb, upright
from flowgrpo.errors import UserError
from flowgrpo.files import address, text_of, unfit

MEAN = (0.48145466, 0.4578275, 0.40821073)  # of CLIP's training images, kept by BLIP's models
DEVIATION = (0.26862954, 0.26130258, 0.27577711)
VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi")
CROPS: dict[str, Callable[[float], int]] = {"torchvision": round, "transformers": int}  # of half the surplus
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


@dataclass(frozen=True)
class Preparation:
    """Convert images [B, 3, H, W] in [0, 1] to [B, 3, size, size], scaled and normalised on their device.

    fit: the side that becomes `size`: the "shortest", with a centre crop; the "longest", centred on black padding; or
    both ("squash").
    scaling: as in `resized`. crop: where a crop of an odd number of pixels begins: at the half rounded to the even
    number ("torchvision"), or rounded down ("transformers").
    """

    size: int = 224
    fit: str = "shortest"
    mean: Sequence[float] = MEAN
    deviation: Sequence[float] = DEVIATION
    scaling: str = "pil"
    crop: str = "torchvision"

    def __call__(self, images: Tensor) -> Tensor:
        images = resize_images(images, self.sides(*images.shape[-2:]), self.scaling)
        # The centre; black where an image is smaller.
        height, width = (max(self.size - side, 0) for side in images.shape[-2:])
        images = pad(images, (width // 2, width - width // 2, height // 2, height - height // 2))
        top, left = (CROPS[self.crop]((side - self.size) / 2) for side in images.shape[-2:])
        images = images[..., top:top + self.size, left:left + self.size] / 255
        mean, deviation = (torch.tensor(values, device=images.device)[:, None, None]
                           for values in (self.mean, self.deviation))
        return (images - mean) / deviation

    def sides(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of an image before it is cropped or padded to a square."""
        if self.fit == "squash":
            return self.size, self.size
        if self.fit == "longest":
            scale = self.size / max(height, width)
            return round(height * scale), round(width * scale)
        short = min(height, width)
        return int(self.size * height / short), int(self.size * width / short)


def resize_images(images: Tensor, sides: tuple[int, int], scaling: str = "pil") -> Tensor:
    """Resize 8-bit images, given as [B, 3, H, W] in [0, 1], to levels 0 to 255, float32 [B, 3, *sides]: bicubic, with
    a filter against aliasing.

    scaling: "pil" rounds and clamps after each axis, first the width, as PIL does. The others are torchvision's, on
    tensors: of "bytes", rounded and clamped once, at the end; of "floats", neither, so that edges overshoot;
    "unfiltered", of floats without the filter (torchvision before 0.17).
    The gradient passes straight through the rounding.
    """
    smooth = (images.float() * 255).clamp(0, 255)
    levels = straight(smooth.round(), smooth)
    if scaling != "pil":
        if tuple(levels.shape[-2:]) == tuple(sides):
            return levels
        smooth = interpolate(levels, sides, mode="bicubic", antialias=scaling != "unfiltered")
        return straight(smooth.round().clamp(0, 255), smooth) if scaling == "bytes" else smooth
    for size in ((levels.shape[-2], sides[1]), sides):
        if tuple(levels.shape[-2:]) != size:
            smooth = interpolate(levels, size, mode="bicubic", antialias=True).clamp(0, 255)
            levels = straight((smooth + 0.5).floor(), smooth)  # halves round up, as in PIL
    return levels


def straight(exact: Tensor, smooth: Tensor) -> Tensor:
    """`exact` to the bit, with the gradient of `smooth` where that carries a graph."""
    return exact + (smooth - smooth.detach()) if smooth.requires_grad else exact


def tensor_of(image: Image) -> Tensor:
    """Image [3, H, W] in [0, 1], upright; grey of more than 8 bits keeps its levels."""
    from torchvision.transforms.functional import to_tensor

    wide = levels(upright(image)) if "transparency" not in image.info else None
    return to_tensor(rgb(image)) if wide is None else torch.from_numpy(wide).expand(3, -1, -1)


def read_tensor(path: str | Path) -> Tensor:
    """Image of a file, upright: [3, H, W] in [0, 1]. Raises UserError if it is none."""
    with open_checked(path, FLOATS) as image:
        require_single(image)
        return tensor_of(image)


def read_tensors(path: str | Path) -> list[Tensor]:
    """Frames of an animated image, upright, each [3, H, W] in [0, 1]; of a still image one.

    Raises UserError if it is none, and for more than FLOATS pixels in all frames.
    """
    def shown(image: Image) -> Iterator[Image]:
        for page in pages(image) if image.format != "MPO" else [0]:
            image.seek(page)
            yield image

    with open_checked(path, FLOATS) as image:
        return _tensors_of(path, shown(image))


def _tensors_of(path: str | Path, images: Iterable[Image]) -> list[Tensor]:
    frames: list[Tensor] = []
    for image in images:
        if (len(frames) + 1) * image.width * image.height > FLOATS:
            raise UserError(f"{path} has more than {FLOATS:,} pixels in its frames: scale it down, or cut it")
        frames.append(tensor_of(image))
    if not frames:
        raise UserError(f"{path} holds no frame that can be read")
    return frames


def eight_bit(images: Tensor) -> np.ndarray:
    """Images [..., 3, H, W] in [0, 1] as bytes [..., H, W, 3], rounded to the nearest."""
    return (images.detach().cpu().float() * 255).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1).numpy()


def grey(images: Tensor) -> Tensor:
    """Luminance [..., H, W] in [0, 1] of images [..., 3, H, W] in [0, 1], in float64 on the CPU."""
    return torch.einsum("...chw,c->...hw", images.detach().cpu().double(), torch.tensor(LUMA, dtype=torch.float64))


def _alike(path: Path, frames: list[torch.Tensor]) -> list[torch.Tensor]:
    sizes = list(dict.fromkeys(f"{frame.shape[-2]} x {frame.shape[-1]}" for frame in frames))
    if len(sizes) != 1:
        raise UserError(f"{path}: " + (f"frames of {' and '.join(sizes[:3])} pixels" if sizes else "no file in it") +
                        ", expected frames of one size: the images of one clip")
    return frames


def read_output(path: Path) -> torch.Tensor | str:
    """Read an image [3,H,W] in [0, 1], a video [F,3,H,W], or a text. Raises UserError if it cannot be read."""
    if not path.exists():
        why = unfit(path)
        raise UserError(f"no file at {address(path) or path}" + f": it {why}" * (why != "does not exist"))
    try:
        if path.suffix == ".txt":
            return text_of(path)
        if path.is_dir():
            return torch.stack(_alike(path, [read_tensor(file) for file in stills(path)]))
        frames = _tensors_of(path, frames_of(path)) if path.suffix.lower() in VIDEOS else read_tensors(path)
        return torch.stack(_alike(path, frames)) if len(frames) > 1 else frames[0]
    except RuntimeError as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())[:200]}): expected an image, a video, "
                        "a folder of frames of one size, or a .txt file") from None
