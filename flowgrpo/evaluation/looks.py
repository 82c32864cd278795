"""Looks of a run's held-out images: how wide their edges are, and how far the images of a prompt are apart.

Both are compared with the base's, of the same prompts and seeds: training that blurs widens edges, and training that
collapses makes images of a prompt alike. Neither reads a prompt or a model.

Edge width: `guards.edge_widths`; of the packaged scenes, whose contours are known, `scene.edge_widths`.
Diversity: the mean distance of the images of a prompt, by miniatures of 16 x 16 pixels (`guards.pixels`), which a blur
hardly changes. Of one image per prompt (`eval.samples: 1`) an eighth of the prompts, at least TWINS, has a second one
drawn, which no reward scores. Of a clip the middle frame is read.

A change counts if it is both large, beyond WIDE or ALIKE, and more than chance: its 95 % interval, paired by prompt
over at least TWINS prompts, excludes 1. Each look is warned of in one direction, so that both together are warned of by
chance in less than 5 % of cases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flowgrpo.evaluation.statistics import STUDENT, Interval, change
from flowgrpo.starter import SCENES
from flowgrpo.storage.json_files import finite

if TYPE_CHECKING:
    from torch import Tensor

SIZE = 64  # pixels of a packaged scene's side
TWINS, SHARE = 8, 8  # prompts with a second image: at least, and one in so many
EDGES, APART = "edge_width", "diversity"
LOOKS = "of_base/"  # of metrics: shares of the base's
WIDE, ALIKE = 1.1, 0.9  # of the base: edges wider than by a blur of 0.5 pixels, images more alike than by chance


class Share(float):
    """Share of the base's: a number, with its 95 % interval where the prompts' values are known."""

    interval: Interval | None = None

    @property
    def certain(self) -> bool:
        return self.interval is None or not self.interval.low <= 1 <= self.interval.high


@dataclass(frozen=True)
class Looks:
    """Looks of a measurement.

    edge_width: mean over the prompts, in pixels. diversity: mean over the prompts with two images or more; black and
    white are 1 apart. NaN without any. of_prompts: both of each prompt [N], None where it has none; empty if unknown.
    """

    edge_width: float = math.nan
    diversity: float = math.nan
    of_prompts: Mapping[str, Sequence[float | None]] = field(default_factory=dict, compare=False)

    def relative_to(self, base: Looks) -> dict[str, Share]:
        """Both as shares of the base's, by name; those that are known."""
        shares = {}
        for name in (EDGES, APART):
            now, was = getattr(self, name), getattr(base, name)
            if was > 0 and now == now:
                shares[name] = _share(now / was, *(np.array(of.of_prompts.get(name, ()), np.float64)[:, None]
                                                   for of in (base, self)))
        return shares

    def means(self) -> dict[str, float | None]:
        """Both means for JSON: None in place of NaN."""
        return finite({EDGES: self.edge_width, APART: self.diversity})

    def as_json(self) -> dict[str, Any]:
        return {**self.means(), "of_prompts": self.of_prompts}


def read(known: Mapping[str, Any] | None) -> Looks:
    """Looks that `as_json` wrote, as far as they are known."""
    found = known or {}
    width, apart = (value if isinstance(value, (int, float)) else math.nan
                    for value in (found.get(name) for name in (EDGES, APART)))
    return Looks(width, apart, found.get("of_prompts", {}))


def _share(ratio: float, was: np.ndarray, now: np.ndarray) -> Share:
    """Share of looks by those of the prompts [N, 1], NaN where there are none; of other numbers of prompts the ratio of
    the means alone."""
    if was.shape != now.shape or not (known := ~np.isnan(was + now)).any():
        return Share(ratio)
    moved, mean = change(was, now, STUDENT), float(was[known].mean())
    share = Share(1 + moved.mean / mean)
    share.interval = replace(moved, mean=float(share), low=1 + moved.low / mean, high=1 + moved.high / mean)
    return share


def twins(prompts: int, samples: int) -> int:
    """Number of prompts of which a second image is drawn."""
    return min(prompts, max(TWINS, prompts // SHARE)) if samples == 1 else 0


def features(images: Sequence[Tensor] | Tensor, model: str = "") -> Tensor:
    """Edge width and miniature [B, 769] of images [3, H, W] in [0, 1], or of clips [F, 3, H, W].

    model: of a packaged one's scenes the contours are measured.
    """
    import torch

    from flowgrpo.rewards import guards

    rows = [torch.empty(0, 1 + 3 * guards.SMALL**2)]
    for image in images:
        still = (image if image.ndim == 3 else image[len(image) // 2])[None].detach().float().cpu()
        widths = guards.edge_widths(still)
        if model in SCENES and still.shape[-2:] == (SIZE, SIZE):
            from flowgrpo.rewards.starter import scene

            widths = torch.tensor(scene.edge_widths(still))
        rows.append(torch.cat([widths[:, None].float(), guards.pixels(still).float()], 1))
    return torch.cat(rows)


def measure_looks(found: Tensor, prompts: Sequence[int], lost: Sequence[bool] = ()) -> Looks:
    """Looks of images by their `features` [N, D].

    prompts: number of each image's prompt, [N]. lost: by that number, prompts that are left out; empty for none.
    """
    import torch

    from flowgrpo.rewards import guards

    of, found = torch.tensor(prompts, dtype=torch.int64), found.double()
    values: dict[str, list[float | None]] = {EDGES: [], APART: []}
    for number in dict.fromkeys(prompts):
        group, gone = found[of == number], bool(lost and lost[number])
        wide = group[:, 0].nanmean().item()
        values[EDGES].append(None if gone or math.isnan(wide) else wide)
        values[APART].append(None if gone or len(group) < 2 else guards.distances(group[None, :, 1:]).mean().item())
    known = {name: [value for value in of_one if value is not None] for name, of_one in values.items()}
    width, apart = (math.fsum(some) / len(some) if some else math.nan for some in known.values())
    return Looks(width, apart, values)


def describe_looks(shares: Mapping[str, float]) -> list[tuple[str, str]]:
    """Describe looks as shares of the base's, each with its tone: plain, or warn for a change that counts."""
    said = []
    for name, text, effect, large in (
            (EDGES, "Edges are {} times as wide as the base's", "the images are blurred", lambda share: share > WIDE),
            (APART, "Images of a prompt are {} times as far apart as the base's", "they became alike",
             lambda share: share < ALIKE)):
        if name not in shares:
            continue
        found = shares[name]
        share = found if isinstance(found, Share) else Share(found)
        of = share.interval
        few = f"too few prompts to tell (at least {TWINS})" if of is not None and of.prompts < TWINS else ""
        ends = "" if of is None or math.isnan(of.low) else f" (95 %: {of.low:.2f} to {of.high:.2f})"
        end = "" if not large(share) else f": {few or effect}" if few or share.certain else ", which may be chance"
        said.append(("warn" if large(share) and share.certain and not few else "plain",
                     f"{text.format(format(share, '.2f'))}{ends}{end}."))
    return said
