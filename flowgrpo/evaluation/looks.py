"""Looks of a run's held-out images: how wide their edges are, and how far the images of a prompt are apart.

Both are compared with the base's, of the same prompts and seeds: training that blurs widens edges, and training that
collapses makes images of a prompt alike. Neither reads a prompt or a model.

Edge width: `guards.edge_widths`; of the packaged scenes, whose contours are known, `scene.edge_widths`.
Diversity: the mean distance of the images of a prompt, by miniatures of 16 x 16 pixels (`guards.pixels`), which a blur
hardly changes. Of one image per prompt (`eval.samples: 1`) an eighth of the prompts, at least TWINS, has a second one
drawn, which no reward scores. Of a clip the middle frame is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowgrpo.starter import SCENES

if TYPE_CHECKING:
    from torch import Tensor

SIZE = 64  # pixels of a packaged scene's side
TWINS, SHARE = 8, 8  # prompts with a second image: at least, and one in so many
EDGES, APART = "edge_width", "diversity"
LOOKS = "of_base/"  # of metrics: shares of the base's
WIDE, ALIKE = 1.1, 0.9  # of the base: edges wider than by a blur of 0.5 pixels, images more alike than by chance


@dataclass(frozen=True)
class Looks:
    """Looks of a measurement.

    edge_width: mean over the images, in pixels. diversity: mean over the prompts with two images or more; black and
    white are 1 apart. NaN without any.
    """

    edge_width: float = math.nan
    diversity: float = math.nan

    def of(self, base: Looks) -> dict[str, float]:
        """Return both as shares of the base's, by name; those that are known."""
        shares = {EDGES: _share(self.edge_width, base.edge_width), APART: _share(self.diversity, base.diversity)}
        return {name: share for name, share in shares.items() if not math.isnan(share)}

    def as_json(self) -> dict[str, float | None]:
        """Return both for JSON: None in place of NaN."""
        return {name: None if math.isnan(value) else value
                for name, value in ((EDGES, self.edge_width), (APART, self.diversity))}


def read(known: Mapping[str, Any] | None) -> Looks:
    """Return the looks that `as_json` wrote, as far as they are known."""
    return Looks(*(value if isinstance(value, (int, float)) else math.nan
                   for value in ((known or {}).get(name) for name in (EDGES, APART))))


def _share(now: float, base: float) -> float:
    return now / base if base > 0 else math.nan


def twins(prompts: int, samples: int) -> int:
    """Return the number of prompts of which a second image is drawn."""
    return min(prompts, max(TWINS, prompts // SHARE)) if samples == 1 else 0


def features(images: Sequence[Tensor] | Tensor, model: str = "") -> Tensor:
    """Return edge width and miniature [B, 769] of images [3, H, W] in [0, 1], or of clips [F, 3, H, W].

    model: of a packaged one's scenes the contours are measured.
    """
    import torch

    from flowgrpo.rewards import guards

    if not len(images):
        return torch.empty(0, 1 + 3 * guards.SMALL**2)
    stills = [image if image.ndim == 3 else image[len(image) // 2] for image in images]
    return torch.cat([_features(still[None].detach().float().cpu(), model) for still in stills])


def _features(image: Tensor, model: str) -> Tensor:
    import torch

    from flowgrpo.rewards import guards

    widths = guards.edge_widths(image)
    if model in SCENES and image.shape[-2:] == (SIZE, SIZE):
        from flowgrpo.rewards.starter import scene

        widths = torch.tensor(scene.edge_widths(image))
    return torch.cat([widths[:, None].float(), guards.pixels(image).float()], 1)


def measure_looks(found: Tensor, prompts: Sequence[int], lost: Sequence[bool] = ()) -> Looks:
    """Return the looks of images by their `features` [N, D].

    prompts: number of each image's prompt, [N]. lost: by that number, prompts that are left out; empty for none.
    """
    import torch

    from flowgrpo.rewards import guards

    kept = [i for i, number in enumerate(prompts) if not (lost and lost[number])]
    rows, found = torch.tensor(prompts, dtype=torch.int64)[kept], found[kept]
    widths = found[:, 0][~found[:, 0].isnan()]
    apart = [guards.distances(group[None]).mean() for number in rows.unique()
             if len(group := found[rows == number, 1:]) > 1]
    return Looks(widths.mean().item() if len(widths) else math.nan,
                 torch.stack(apart).mean().item() if apart else math.nan)


def describe_looks(shares: Mapping[str, float]) -> list[tuple[str, str]]:
    """Describe looks as shares of the base's, each with its tone: plain, or warn beyond WIDE and ALIKE."""
    told = []
    if EDGES in shares:
        wide = shares[EDGES] > WIDE
        told.append(("warn" if wide else "plain",
                     f"Edges are {shares[EDGES]:.2f} times as wide as the base's"
                     + (": the images are blurred." if wide else ".")))
    if APART in shares:
        alike = shares[APART] < ALIKE
        told.append(("warn" if alike else "plain", f"Images of a prompt are {shares[APART]:.2f} times as far apart as "
                                                   f"the base's{': they became alike.' if alike else '.'}"))
    return told
