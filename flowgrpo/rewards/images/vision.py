"""Helpers of rewards with a vision model: preprocessing and weights."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from flowgrpo.errors import UserError
from flowgrpo.policies import hub
from flowgrpo.rewards.local_model import Head

MEAN = (0.48145466, 0.4578275, 0.40821073)  # of CLIP's training pictures, kept by BLIP's models
DEVIATION = (0.26862954, 0.26130258, 0.27577711)
HIDDEN = (1024, 128, 64, 16)  # widths of the perceptron shared by the aesthetic predictor and ImageReward


@dataclass(frozen=True)
class Preparation:
    """Convert pictures [B, 3, H, W] in [0, 1] to [B, 3, size, size], scaled and normalised on their device.

    fit: the side that becomes `size`: the "shortest", with a centre crop; the "longest", centred on black padding; or
    both ("squash"). Sides and crop are torchvision's; where transformers crops an odd number of pixels, it is off by
    one.
    antialias: False scales floats without a filter or rounding, as torchvision did with tensors before 0.17.
    """

    size: int = 224
    fit: str = "shortest"
    mean: Sequence[float] = MEAN
    deviation: Sequence[float] = DEVIATION
    antialias: bool = True

    def __call__(self, pictures: Tensor) -> Tensor:
        pictures = resized(pictures, self.sides(*pictures.shape[-2:]), self.antialias)
        pictures = _middle(pictures, self.size) / 255
        mean, deviation = (torch.tensor(values, device=pictures.device)[:, None, None]
                           for values in (self.mean, self.deviation))
        return (pictures - mean) / deviation

    def sides(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of a picture before it is cropped or padded to a square."""
        if self.fit == "squash":
            return self.size, self.size
        if self.fit == "longest":
            scale = self.size / max(height, width)
            return round(height * scale), round(width * scale)
        short = min(height, width)
        return int(self.size * height / short), int(self.size * width / short)


def resized(pictures: Tensor, sides: tuple[int, int], antialias: bool = True) -> Tensor:
    """Resize pictures [B, 3, H, W] in [0, 1] to integers 0 to 255, float32 [B, 3, *sides], as PIL's bicubic resizing of
    8-bit pictures does: first the width, rounded, then the height.

    The gradient passes straight through the rounding. antialias: False gives floats of a plain bicubic resizing.
    """
    smooth = (pictures.float() * 255).clamp(0, 255)
    levels = straight(smooth.round(), smooth)
    if not antialias:
        return interpolate(levels, sides, mode="bicubic") if tuple(levels.shape[-2:]) != sides else levels
    for size in ((levels.shape[-2], sides[1]), sides):
        if tuple(levels.shape[-2:]) != size:
            smooth = interpolate(levels, size, mode="bicubic", antialias=True).clamp(0, 255)
            levels = straight((smooth + 0.5).floor(), smooth)  # halves round up, as in PIL
    return levels


def straight(exact: Tensor, smooth: Tensor) -> Tensor:
    """Return `exact` to the bit, with the gradient of `smooth` where that carries a graph."""
    return exact + (smooth - smooth.detach()) if smooth.requires_grad else exact


def _middle(pictures: Tensor, size: int) -> Tensor:
    """Return the centre of pictures, size by size; black where a picture is smaller."""
    height, width = pictures.shape[-2:]
    lack_h, lack_w = max(size - height, 0), max(size - width, 0)
    pictures = pad(pictures, (lack_w // 2, lack_w - lack_w // 2, lack_h // 2, lack_h - lack_h // 2))
    top, left = (round((side - size) / 2) for side in pictures.shape[-2:])
    return pictures[..., top:top + size, left:left + size]


@contextmanager
def loading(what: str, fix: str, source: str = ".") -> Iterator[None]:
    """Context manager for loading weights: any error becomes a UserError with the object, the reason and the fix.

    source: their name on the hub, or a local path. A hub that does not answer is not asked again and again.
    """
    try:
        hub.read_cache_alone(source)
        yield
    except UserError:
        raise
    except Exception as error:  # a hub, a file and a library fail in many ways
        reason = hub.unreached(error) or textwrap.shorten(str(error), 160, placeholder=" ...")
        raise UserError(f"{what} cannot be loaded ({reason}): {fix}") from None


def pretrained(reward: str, kind: Any, name: str, revision: str | None, option: str, within: str = "",
               **more: Any) -> Any:
    """Load a model or tokenizer of transformers from a folder or the hub, without running code from there.

    option: the reward's argument that names it, inside the argument `within` if given.
    Raises UserError, which names `option`, if it is unavailable.
    """
    given = f"{{{within}: {{{option}: FOLDER}}}}" if within else f"{{{option}: FOLDER}}"
    with loading(f"reward {reward!r}: {name}", f"fetch it and give its folder as args: {given}", name):
        return kind.from_pretrained(name, revision=revision, trust_remote_code=False, **more)


def tensors(reward: str, where: str, revision: str | None, option: str) -> dict[str, Tensor]:
    """Load the tensors of a checkpoint: a file, or `owner/name/file` on the hub. Nothing else is unpickled.

    option: the reward's argument that names it.
    Raises UserError, which names `option`, if it is unavailable.
    """
    with loading(f"reward {reward!r}: {where}", f"fetch it and give its path as args: {{{option}: FILE}}", where):
        path = Path(where) if Path(where).is_file() else from_hub(where, revision)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        return checkpoint.get("state_dict", checkpoint)


def from_hub(where: str, revision: str | None) -> Path:
    """Return the local path of the hub's file OWNER/NAME/FILE. Raises FileNotFoundError for another form."""
    if where.count("/") < 2 or where.startswith(("/", ".", "~")):
        raise FileNotFoundError("no such file")
    from huggingface_hub import hf_hub_download

    owner, name, file = where.split("/", 2)
    return Path(hf_hub_download(f"{owner}/{name}", file, revision=revision))


def fill(reward: str, network: torch.nn.Module, state: dict[str, Tensor], where: str) -> None:
    """Load every tensor of a network.
    Raises UserError for a checkpoint of another network."""
    with loading(f"reward {reward!r}: {where}", "give the checkpoint that was made for this reward"):
        network.load_state_dict(state)


def perceptron(width: int) -> Head:
    """Build the head of the aesthetic predictor and of ImageReward: linear layers in sequence, without activations.

    Their trainings had dropout at 1, 3 and 5; the numbers of the layers are those of their checkpoints.
    """
    from torch.nn import Identity, Linear

    widths = (width, *HIDDEN, 1)
    layers = [Linear(*pair) for pair in zip(widths, widths[1:])]
    return Head(layers[0], Identity(), layers[1], Identity(), layers[2], Identity(), *layers[3:])
