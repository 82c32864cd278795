"""Rewards for scene prompts: check from the pixels that an image shows what its prompt claims.

An image of the starter's world (`flowgrpo.starter.scenes`) is read in classical steps: the light ground, the blobs on
it, and for each blob its paint, its outline against the six shapes, and the softness of its edges. Every criterion is a
ramp from 0 (bad) to 1 (good enough) and `scene_graded` is made of products and averages of them, so that

    scene == 1  exactly where  scene_graded == 1  exactly where every criterion is met.

The verdict is that of GenEval (Ghosh et al. 2023) except that all objects count: no other may be in the image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from scipy import ndimage
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from flowgrpo.rewards.about import About, built_in
from flowgrpo.starter.scenes import COLOURS, RELATIONS, SHAPES, SIZE, coverage, parse

ABOUT = About(modality="image", range=(0, 1), needs="", licence="Apache-2.0")

# Ramps: (0 at, 1 from). Colours differ by their Euclidean distance in sRGB; two of the six by >= 0.52.
LIGHT = (0.70, 0.85)  # darkest channel of the ground
TINT = (0.20, 0.08)  # largest difference between the ground's channels
QUIET = (0.10, 0.05)  # standard deviation of the ground, per channel
SHARE = (0.30, 0.45)  # part of the image that is ground
DIRT = (300, 24)  # pixels that belong neither to the ground nor to a blob
OUTLINE = (0.08, 0.03)  # mean distance between outlines over the square root of the area; circle and square: 0.042
LEAD = (-0.12, 0.03)  # margin of the overlap with a shape over that with every other shape
ASPECT = (0.40, 0.86)  # shortest over longest axis; all six shapes have 1
EDGE = (4.4, 3.0)  # width of a blob's edge in pixels; drawn shapes have 1, a blur of 1 pixel makes it 3
PURITY = (0.70, 0.92)  # part of a blob whose pixels are a mixture of the ground and one paint
PAINT = (0.36, 0.20)  # distance of the paint from a colour
AREA = (0, 70)  # pixels of a blob; the smallest object drawn has about 92
DIRECTION = (-1.0, 0.5**0.5)  # cosine between the line of centroids and the direction that the relation names

STANDS_OUT = 0.45  # distance from the ground at which a pixel belongs to a blob: half the contrast of yellow
STAINED = 0.20  # distance from the ground at which a pixel is dirt
GHOST = 0.12  # the same for the mean of 3 by 3 pixels, which removes noise but keeps a faint object
SMALLEST = 16  # pixels; smaller blobs are dirt
MOST = 12  # blobs read per image, the largest first; the others are dirt
FLOOR = 0.25  # remaining credit for a wrong shape, a wrong colour or a wrong relation


def ramp(x, ramp: tuple[float, float]):
    """0 up to the ramp's first bound, 1 from its second on, and a line between; of every element of x."""
    return np.clip((x - ramp[0]) / (ramp[1] - ramp[0]), 0.0, 1.0)


def _above_floor(score):
    return FLOOR + (1 - FLOOR) * score


# --- templates -------------------------------------------------------------------------------------------------------

_FINE, _REACH = 64, 1.5  # pixels per radius of the table of distances, and its half width in radii


def _outline(shape: str) -> tuple[np.ndarray, float, float, float]:
    """Of a shape of radius 1: signed distance on a fine grid (negative inside), area, perimeter, y of the centroid."""
    half = int(_FINE * _REACH)
    mask = coverage(shape, _FINE, (half, half), 2 * half)
    solid = mask > 0.5
    far = ndimage.distance_transform_edt(~solid) - ndimage.distance_transform_edt(solid)
    far -= 0.5 * np.sign(far)  # the outline runs between two pixels' centres
    distance = np.where((mask > 0) & (mask < 1), 0.5 - mask, far) / _FINE
    axis = (np.arange(2 * half) + 0.5 - half) / _FINE
    perimeter = np.count_nonzero(np.abs(distance) < 2 / _FINE) / (4 * _FINE)  # area of a band over its width
    return distance.astype(np.float32), mask.sum() / _FINE**2, perimeter, float(mask.sum(1) @ axis / mask.sum())


_table, _area, _perimeter, _lift = (np.array(part) for part in zip(*map(_outline, SHAPES)))
_PALETTE = np.array(list(COLOURS.values()))


def _pixel_axis(part: slice) -> np.ndarray:
    return np.arange(part.start, part.stop) + 0.5


# --- reading an image -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Detected:
    """One blob of an image, with scores in [0, 1]; 1 means that the blob is good enough in that respect.

    `centre` is (x, y), in pixels; `area` counts pixels. `shapes` [6] and `colours` [6] follow SHAPES and COLOURS.
    `width` is that of its edges in pixels, and `crispness` falls with it. `unity` is 1 for a single paint and a form
    that is neither tiny nor stretched.
    """

    centre: tuple[float, float]
    area: int
    shapes: np.ndarray
    colours: np.ndarray
    width: float
    crispness: float
    unity: float

    @property
    def shape(self) -> str | None:
        """Name of the shape; None for a blob that is not an object, such as a blurred one or two that touch."""
        good = self.shapes.max() == self.crispness == self.unity == 1
        return SHAPES[self.shapes.argmax()] if good else None

    @property
    def colour(self) -> str | None:
        """Name of the colour; None off the palette, or for more than one paint."""
        return list(COLOURS)[self.colours.argmax()] if self.colours.max() == self.unity == 1 else None


@dataclass(frozen=True)
class Reading:
    """Blobs of an image, largest first, and scores in [0, 1] of its ground: light, even and clean."""

    objects: tuple[Detected, ...]
    ground: float


def read(image: Tensor | np.ndarray) -> Reading:
    """Read one image, float [3, 64, 64] in [0, 1] (torch or numpy). Raises ValueError for another shape or range."""
    return _read_once(_pixels(torch.as_tensor(image)[None])[0].tobytes())


def _pixels(images: Tensor | np.ndarray) -> np.ndarray:
    pixels = torch.as_tensor(images).detach().to("cpu", torch.float32)
    if pixels.shape[1:] != (3, SIZE, SIZE):
        raise ValueError(f"the scene reward got images of shape {list(pixels.shape)}, "
                         f"expected [B, 3, {SIZE}, {SIZE}]: resize them first")
    if pixels.numel() and not (pixels.min() >= -0.01 and pixels.max() <= 1.01):
        raise ValueError(f"the scene reward got pixels from {pixels.min():.3g} to {pixels.max():.3g}, "
                         "expected [0, 1]: decode with output_type='pt'")
    return pixels.contiguous().numpy()


@lru_cache(maxsize=4096)
def _read_once(content: bytes) -> Reading:
    """Blobs and ground of an image, float32 [3, 64, 64] in [0, 1]. All rewards of one batch of images, or of clips,
    share the reading."""
    image = np.frombuffer(content, np.float32).reshape(3, SIZE, SIZE)
    offset = image - np.median(image, (1, 2), keepdims=True)
    distance = _length(offset)
    labels, around = _blobs(distance > STANDS_OUT)
    outside = around == 0
    smooth = ndimage.uniform_filter(offset * outside, (1, 3, 3))
    plain = outside & (distance < STAINED) & (_length(smooth) < GHOST)
    if not plain.any():
        return Reading((), 0.0)
    pixels = image.reshape(3, -1).compress(plain.ravel(), 1)  # contiguous, unlike image[:, plain]
    ground = pixels.mean(1)
    dirt = np.count_nonzero(outside) - pixels.shape[1]
    quality = (ramp(ground.min(), LIGHT) * ramp(np.ptp(ground), TINT) * ramp(pixels.std(1).max(), QUIET)
               * ramp(pixels.shape[1] / plain.size, SHARE) * ramp(dirt, DIRT))
    inner = labels * ndimage.binary_erosion(labels > 0)
    offset = image - ground[:, None, None]
    objects = (_describe(offset[(slice(None), *w)], ground, labels[w] == i, around[w] == i, inner[w] == i, w)
               for i, w in enumerate(ndimage.find_objects(around), 1))
    return Reading(tuple(objects), float(quality))


def _length(colours: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("chw,chw->hw", colours, colours))


_CROSS, _BLOCK = ndimage.generate_binary_structure(2, 1), ndimage.generate_binary_structure(2, 2)


def _blobs(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels 1, 2, ... of the connected blobs by falling size, and the same dilated by 3 pixels, to hold the edges."""
    labels, _ = ndimage.label(mask)
    sizes = np.bincount(labels.ravel())
    sizes[0] = 0
    order = np.argsort(-sizes, kind="stable")[:MOST]
    order = order[sizes[order] >= SMALLEST]
    rename = np.zeros(len(sizes), np.int32)
    rename[order] = np.arange(1, len(order) + 1)
    labels = grown = rename[labels]
    for footprint in (_CROSS, _BLOCK, _CROSS):
        grown = np.where(grown > 0, grown, ndimage.grey_dilation(grown, footprint=footprint))
    return labels, grown


def _describe(offset: np.ndarray, ground: np.ndarray, blob: np.ndarray, around: np.ndarray, inner: np.ndarray,
              window: tuple[slice, slice]) -> Detected:
    """Score a blob in its window. offset: [3, h, w] from the ground. around: contains its edge; inner: does not."""
    towards = np.median(offset[:, inner if np.count_nonzero(inner) >= 8 else blob], 1)
    # The median of many paints may equal the ground; then alpha is only this trace of the blob.
    alpha = np.clip(np.tensordot(towards / (towards @ towards + 1e-6), offset, 1), 0, 1) * around + 1e-6 * blob
    mixture = _length(offset - towards[:, None, None] * alpha)[blob] < PAINT[1]
    area, centre, aspect = _moments(alpha, window)
    outlines, leads, width = _compare(alpha, area, centre, window)
    unity = ramp(mixture.mean(), PURITY) * ramp(aspect, ASPECT) * ramp(len(mixture), AREA)
    return Detected(
        (float(centre[0]), float(centre[1])), len(mixture), ramp(outlines, OUTLINE) * ramp(leads, LEAD),
        ramp(np.linalg.norm(ground + towards - _PALETTE, axis=1), PAINT), float(width), float(ramp(width, EDGE)),
        float(unity))


def _compare(alpha: np.ndarray, area: float, centre: np.ndarray,
             window: tuple[slice, slice]) -> tuple[np.ndarray, np.ndarray, float]:
    """Compare a mask [h, w] with the six shapes of its area, centroid and softness.

    Returns the distance between the outlines [6] over the square root of the area, the lead [6] of the overlap
    (intersection over union) over the best other shape's, and the width in pixels of the mask's edge.
    """
    radius = np.sqrt(area / _area)
    # Across an edge that is a ramp of width w, alpha (1 - alpha) integrates to w / 6.
    width = 6 * (alpha * (1 - alpha)).sum() / (_perimeter * radius)
    # Masks [6, h, w] of the shapes with these radii, centroid and softness, from the table of distances.
    middles = centre[1] - _lift * radius, np.full(len(SHAPES), centre[0])
    row, column = (
        np.clip((_pixel_axis(part) - middle[:, None]) / radius[:, None] * _FINE + _REACH * _FINE,
                0, len(_table[0]) - 1).astype(np.intp) for part, middle in zip(window, middles))
    distance = _table[np.arange(len(SHAPES))[:, None, None], row[:, :, None], column[:, None, :]]
    templates = np.clip(0.5 - distance * (radius / np.clip(width, 1, 4))[:, None, None], 0, 1)
    shared = np.minimum(templates, alpha).sum((1, 2))
    overlap = shared / (2 * area - shared)
    second, best = np.argsort(overlap)[-2:]
    lead = overlap - overlap[best]
    lead[best] = overlap[best] - overlap[second]
    return (1 - overlap) * np.sqrt(area) / (_perimeter * radius), lead, width[best]


def _moments(alpha: np.ndarray, window: tuple[slice, slice]) -> tuple[float, np.ndarray, float]:
    """Area, centroid (x, y) and shortest over longest axis of a mask [h, w]."""
    y, x = map(_pixel_axis, window)
    area, column, row = alpha.sum(), alpha.sum(0), alpha.sum(1)
    centre = np.array([column @ x, row @ y]) / area
    x, y = x - centre[0], y - centre[1]
    xx, yy, xy = column @ (x * x), row @ (y * y), y @ alpha @ x
    spread = np.hypot(xx - yy, 2 * xy)
    return area, centre, float(np.sqrt(max(xx + yy - spread, 0.0) / (xx + yy + spread)))


# --- the rewards -----------------------------------------------------------------------------------------------------

def edge_widths(images: Tensor | np.ndarray) -> list[float]:
    """Mean width in pixels of the contours of each image's objects, [B, 3, 64, 64] in [0, 1]; NaN without objects.

    Drawn shapes have 1, whatever their number or size. An object here is a blob of one paint that is neither tiny nor
    stretched. Raises ValueError for other images.
    """
    widths = [[blob.width for blob in _read_once(image.tobytes()).objects if blob.unity == 1]
              for image in _pixels(images)]
    return [float(np.mean(found)) if found else float("nan") for found in widths]


@built_in("scene_edge_width", about=About(modality="image", range=(0, None), needs="", licence="Apache-2.0"))
def scene_edge_width(images: Tensor | np.ndarray, prompts: Sequence[str]) -> list[float | None]:
    """Mean width in pixels of the contours of an image's objects, which grows with blur; None without objects.

    images: float [B, 3, 64, 64] in [0, 1]. Raises ValueError for other images.
    """
    return [None if width != width else width for width in edge_widths(images)]


@lru_cache(maxsize=4096)
def _slots(prompt: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Of every claimed object the index of its shape and of its colour (-1: any), and whether it is of the first claim;
    and the direction of the relation."""
    claims = parse(prompt)
    names = list(COLOURS)
    rows = [(SHAPES.index(claim.shape), names.index(claim.colour) if claim.colour else -1, number == 0)
            for number, claim in enumerate(claims.objects) for _ in range(claim.count)]
    shapes, colours, first = (np.array(column) for column in zip(*rows))
    return shapes, colours, first, np.array(RELATIONS[claims.relation]) if claims.relation else None


@built_in("scene_graded", "count counting colour color shape", ABOUT)
def scene_graded(images: Tensor | np.ndarray, prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]] | None = None) -> list[float]:
    """Degree in [0, 1] to which each image shows what its prompt claims; 1 exactly where `scene` is 1.

    ground * direction * (credit of the claimed objects) / (claimed objects + extra blobs), where each claimed object
    gets one blob and the credit crispness * unity * shape * colour.

    images: float [B, 3, 64, 64] in [0, 1]; prompts: B strings.
    Raises ValueError for other images, for another number of prompts, and for a prompt outside the grammar of
    `scenes.parse`.
    """
    slots = [_slots(prompt) for prompt in prompts]
    pixels = _pixels(images)
    if len(pixels) != len(slots):
        raise ValueError(f"the scene reward got {len(pixels)} images and {len(slots)} prompts, "
                         "expected one prompt for each image")
    return [_grade(_read_once(image.tobytes()), *slot) for image, slot in zip(pixels, slots)]


@built_in("scene", "count counting colour color shape", ABOUT)
def scene(images: Tensor | np.ndarray, prompts: Sequence[str],
          metadata: Sequence[dict[str, Any]] | None = None) -> list[float]:
    """1.0 where an image shows exactly what its prompt claims and nothing else, otherwise 0.0.

    Arguments and errors are those of `scene_graded`.
    """
    return [float(grade == 1.0) for grade in scene_graded(images, prompts, metadata)]


def _grade(reading: Reading, shape: np.ndarray, colour: np.ndarray, first: np.ndarray, direction: np.ndarray | None
           ) -> float:
    if not reading.objects:
        return 0.0
    centres = np.array([blob.centre for blob in reading.objects])
    # Of each blob as each claimed object: [blobs, slots].
    shapes = np.array([blob.shapes for blob in reading.objects])[:, shape]
    colours = np.array([[*blob.colours, blob.colours.max()] for blob in reading.objects])[:, colour]
    whole = np.array([blob.crispness * blob.unity for blob in reading.objects])
    credit = whole[:, None] * _above_floor(shapes) * _above_floor(colours)
    # If shapes and colours leave a choice (a ring left of a ring), the relation decides.
    hint = 0.0 if direction is None else 1e-4 / SIZE * np.outer(centres @ direction, 2 * first - 1)
    taken, slot = linear_sum_assignment(credit + hint, maximize=True)
    extra = ramp(np.delete([blob.area for blob in reading.objects], taken), AREA).sum()
    shown = credit[taken, slot].sum() / (len(shape) + extra)
    return float(reading.ground * shown * _direction(centres[taken], first[slot], direction))


def _direction(centres: np.ndarray, first: np.ndarray, direction: np.ndarray | None) -> float:
    """Credit of a relation: the worst pair of a first and another object; 1 if none is claimed."""
    if direction is None:
        return 1.0
    if first.all() or not first.any():
        return FLOOR
    line = (centres[first][:, None] - centres[~first][None]).reshape(-1, 2)
    cosine = line @ direction / np.maximum(np.linalg.norm(line, axis=1), 1e-6)
    return float(_above_floor(ramp(cosine, DIRECTION)).min())
