"""Reward of a completion's SVG code: it is rendered by resvg and compared with a reference picture (RRVF, RLRF)."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowgrpo.data.client_files import require_open
from flowgrpo.errors import UserError
from flowgrpo.packages import needed
from flowgrpo.rewards.about import About
from flowgrpo.text.rewards.answer_keys import spoken

if TYPE_CHECKING:
    from torch import Tensor

_SVG = re.compile(r"<svg\b.*?</svg\s*>", re.S | re.I)
# An href other than to an element of the file or to embedded data, an entity, a document type, CSS that loads.
_OUTSIDE = re.compile(r"href\s*=\s*[\"']?\s*(?!#|data:)[^\s\"'>]|<!ENTITY|<!DOCTYPE|@import"
                      r"|data:\s*image/svg|url\(\s*[\"']?\s*(?!#)[^\s\"')]", re.I)
USES = 64  # <use> elements, each of which may repeat others


def svg_of(text: str) -> str | None:
    """Return the last <svg> element of a completion, after its thoughts; None if there is none."""
    elements = _SVG.findall(spoken(text))
    return elements[-1] if elements else None


def sound(code: str, longest: int) -> bool:
    """True for code that names nothing outside itself, is not longer than `longest` characters and repeats little."""
    return len(code) <= longest and not _OUTSIDE.search(code) and code.lower().count("<use") <= USES


def similarity(picture: Tensor, reference: Tensor, edges: float) -> float:
    """Return the likeness of two pictures [3, H, W] in [0, 1]: 1 for equal ones.

    It is 1 less the root of the mean squared difference, and with the weight `edges` the share that the steps between
    neighbouring pixels have in common: 1 less their mean absolute difference over the sum of their means.
    """
    apart = (picture - reference).square().mean().sqrt().item()
    different, total = 0.0, 0.0
    for dim in (-1, -2):
        one, other = picture.diff(dim=dim), reference.diff(dim=dim)
        different += (one - other).abs().mean().item()
        total += (one.abs().mean() + other.abs().mean()).item()
    return (1 - edges) * (1 - apart) + edges * (1 - different / total if total else 1.0)


def alike(features: Tensor, others: Tensor) -> float:
    """Return 1 less half the distance of two features [1, D], scaled to unit length: 1 for equal ones, 0 for opposite
    ones."""
    one, other = (each / each.norm().clamp(min=1e-12) for each in (features, others))
    return 1 - (one - other).norm().item() / 2


def render(code: str, height: int, width: int) -> Tensor | None:
    """Return SVG code as a picture [3, height, width] on white; None if it cannot be rendered. No font is loaded."""
    import torch
    from PIL import Image

    resvg = needed("resvg_py", "svg", "reward 'svg_render'")
    try:
        data = resvg.svg_to_bytes(svg_string=code, width=width, height=height, background="#ffffff",
                                  skip_system_fonts=True)
        with Image.open(io.BytesIO(bytes(data))) as opened:
            picture = opened.convert("RGB").resize((width, height))
    except BaseException as error:  # the renderer's own panics derive from it
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)):
            raise
        return None
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(height, width, 3).permute(
        2, 0, 1).float() / 255


@dataclass(frozen=True)
class SvgRender:
    """Likeness of the image that a completion's SVG code makes to a reference image; 0 for code that makes none.

    key: metadata key of the reference's path; None for a prompt without it. Where a prompt brings an `image`, that is
    the one. size: pixels of either side of both pictures. edges: weight of edges beside colours, see `similarity`.
    semantic: weight of the likeness of `features` beside both, see `alike`; features as in `diversity`, such as "clip".
    longest: characters; longer code scores 0. brevity: weight of the code's length over `longest`, subtracted.
    Code that names files or addresses, or repeats too much, scores 0 and is not rendered. No font is loaded, so texts
    are not drawn.
    """

    key: str = "image"
    size: int = 128
    edges: float = 0.5
    semantic: float = 0.0
    features: Any = "clip"
    longest: int = 20_000
    brevity: float = 0.0
    about = About(modality="text", range=(0, 1), needs="svg", licence="Apache-2.0, MPL-2.0 package")
    keyed = True  # nothing is scored without the key
    privileged = True  # reads files that metadata name

    def __post_init__(self) -> None:
        if not (2 <= self.size <= 1024 and 0 <= self.edges <= 1 and 0 <= self.semantic <= 1 and self.longest >= 1
                and 0 <= self.brevity < 1):
            raise UserError(f"reward 'svg_render': got size {self.size}, edges {self.edges}, semantic {self.semantic}, "
                            f"longest {self.longest}, brevity {self.brevity}, expected 2 to 1024, 0 to 1, 0 to 1, from "
                            "1, and 0 to below 1")
        needed("resvg_py", "svg", "reward 'svg_render'")
        if self.semantic:
            from flowgrpo.rewards.guards import extractor

            object.__setattr__(self, "features", extractor(self.features))

    def __call__(self, completions: Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        return [None if self.key not in entry else self._one(text, entry[self.key])
                for text, entry in zip(completions, metadata)]

    def _one(self, text: str, path: str) -> float:
        code = svg_of(text)
        if code is None or not sound(code, self.longest):
            return 0.0
        picture = render(code, self.size, self.size)
        if picture is None:
            return 0.0
        reference = _reference(path, self.size)
        value = similarity(picture, reference, self.edges)
        if self.semantic:
            value += self.semantic * (alike(self.features(picture[None]), self.features(reference[None])) - value)
        return max(0.0, value - self.brevity * len(code) / self.longest)


def _reference(path: str, size: int) -> Tensor:
    from torchvision.transforms.functional import resize

    from flowgrpo.rewards.preprocessing import read_tensor

    require_open()
    try:
        return resize(read_tensor(path), [size, size], antialias=True)
    except UserError as error:
        raise UserError(f"reward 'svg_render': the reference {error}") from None
