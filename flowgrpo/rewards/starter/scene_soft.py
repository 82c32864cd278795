"""Differentiable form of the `scene` reward, for refl, draft and alignprop; and the style of the starter's scenes: flat
areas with crisp edges, without grain, blur or shading.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flowgrpo.rewards.about import About, built_in, differentiable
from flowgrpo.rewards.guards import widths_of
from flowgrpo.starter import scenes
from flowgrpo.starter.scenes import COLOURS, RELATIONS, SHAPES, SIZE, Claims, coverage, parse

GROUND = 0.95  # assumed ground level; drawn ones have 0.90 to 1 in every channel
EDGE = 0.12  # softness of a pixel's transition from the ground to a paint, as a share of the way
TINT = 0.25  # distance in sRGB from the line between ground and paint at which a pixel counts half
STRANGE = 0.35  # distance from the ground at which a pixel is half painted
RADII = tuple(7.3 * 1.11**k for k in range(8))  # pixels, 7.3 to 15.2; drawn objects have 7.5 to 15
REACH = 1.25  # radii; the union is of the template and of the paint up to this distance from its centre
NEAR = 4  # pixels around a place in which shapes are compared, since their centres are not their centroids
SHARPNESS = 25.0  # of the probability of a shape, per overlap
APART = 1.3  # radii around a place without another place
OBJECT = 120.0  # painted pixels elsewhere that count as one more object
FLOOR = 0.25  # remaining credit of a wrong relation
TRUE = 0.5**0.5  # minimum cosine of the line of centroids to the claimed direction for a relation to hold
TURN = 0.08  # softness of the transition from not holding to holding
FAINT = 110.0  # pixels of a colour (the ground counts 60) below which no object is sought, unless there is no other
WIDTH = SIZE + 20  # of the padded images in the transforms, so that templates do not wrap around
ABOUT = About(modality="image", range=(0, 1), needs="", licence="Apache-2.0")
BOUNDS = np.array([0.0, *np.geomspace(0.01, 1.5, 12)])  # of gradients; the largest of an image in [0, 1] is sqrt(2)
RENDERED, SEED = 256, 0  # scenes of the reference


@lru_cache(maxsize=8)
def _bank(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Templates [2, 6, radii, 2*SIZE, 2*SIZE] of six shapes and of the rest of their discs, centred at pixel SIZE;
    their transforms [2, 6, radii, WIDTH, WIDTH//2+1], centred at pixel 0; and the shapes' areas [6, radii]."""
    middle = (WIDTH // 2 + 0.5, WIDTH // 2 + 0.5)
    shapes = np.array([[coverage(shape, radius, middle, WIDTH) for radius in RADII] for shape in SHAPES])
    discs = np.array([coverage("circle", REACH * radius / 0.97, middle, WIDTH) for radius in RADII])  # circle: 0.97
    bank = torch.from_numpy(np.stack([shapes, (discs - shapes).clip(0)])).to(device, dtype)
    transforms = torch.fft.rfft2(bank.roll((-(WIDTH // 2),) * 2, (-2, -1))).conj()
    return F.pad(bank, (SIZE - WIDTH // 2,) * 4), transforms, bank[0].sum((2, 3))


def membership(images: Tensor) -> Tensor:
    """Degree in [0, 1] of each colour at every pixel, [B, 6, H, W] of images [B, 3, H, W]: a sigmoid of the pixel's
    progress from the ground to the paint, times its closeness to that line."""
    offset = images[:, None] - GROUND
    way = images.new_tensor(list(COLOURS.values()))[None, :, :, None, None] - GROUND
    along = (offset * way).sum(2) / way.square().sum(2)
    beside = (offset - way * along.clamp(0, 1)[:, :, None]).square().sum(2)
    return ((along - 0.5) / EDGE).sigmoid() / (1 + beside / TINT**2)


def foreground(images: Tensor) -> Tensor:
    """Every pixel's difference from the ground, in [0, 1]: [B, H, W] of images [B, 3, H, W]."""
    far = (images - GROUND).square().sum(1) / STRANGE**2
    return far.square() / (far.square() + 1)


def overlaps(colours: Tensor, paint: Tensor) -> Tensor:
    """Intersection over union of every colour [n, H, W] with the templates centred at every pixel: [n, 6, radii, H, W].
    The union is that of the template and of any paint [H, W] in its disc."""
    _, transforms, area = _bank(paint.dtype, paint.device)
    shared, around = _correlate(colours, transforms[0]), _correlate(paint[None], transforms[1])
    return shared / (area[..., None, None] + around)


def overlap(colour: Tensor, paint: Tensor, shape: int, radius: int, y: int, x: int) -> Tensor:
    """One entry of `overlaps`, with a gradient: of a colour [H, W] with one template at one pixel."""
    templates, _, area = _bank(paint.dtype, paint.device)
    shared, rest = templates[:, shape, radius, SIZE - y:2 * SIZE - y, SIZE - x:2 * SIZE - x]
    return (colour * shared).sum() / (area[shape, radius] + (paint * rest).sum())


def _correlate(maps: Tensor, transforms: Tensor) -> Tensor:
    """Sums [n, ..., H, W] of maps [n, H, W] under templates, given by their transforms, at every pixel."""
    waves = torch.fft.rfft2(maps, (WIDTH, WIDTH))[:, None, None] * transforms
    return torch.fft.irfft2(waves, (WIDTH, WIDTH))[..., :SIZE, :SIZE]


@built_in("scene_soft", about=ABOUT)
@differentiable
def scene_soft(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Soft, differentiable form of `scene_graded`: degree in [0, 1] to which each image shows its prompt's claims.

    images: float [B, 3, 64, 64] in [0, 1]; prompts: B strings. Returns [B]. A faithful image has about 0.8.
    Raises ValueError for other images, for another number of prompts, and for a prompt outside the grammar of
    `scenes.parse`.
    """
    if images.shape[1:] != (3, SIZE, SIZE) or len(images) != len(prompts):
        raise ValueError(f"the reward scene_soft got images of shape {list(images.shape)} and {len(prompts)} "
                         f"prompts, expected [B, 3, {SIZE}, {SIZE}] and B prompts")
    if not len(images):
        return images.new_zeros(0)
    images = images.to(torch.promote_types(images.dtype, torch.float32))
    maps, paint = membership(images), foreground(images)
    return torch.stack([_score(colours, spent, parse(prompt)) for colours, spent, prompt in zip(maps, paint, prompts)])


def _score(maps: Tensor, paint: Tensor, claims: Claims) -> Tensor:
    """Score of one image, from its colours [6, H, W] and its paint [H, W]."""
    slots = [number for number, claim in enumerate(claims.objects) for _ in range(claim.count)]
    named = {claim.colour for claim in claims.objects}
    if None in named:  # its colour is open: those present in the image
        mass = maps.detach().sum((1, 2))
        there = (mass > FAINT) | (mass == mass.max())
        named |= {name for name, present in zip(COLOURS, there.tolist()) if present}
    names = [name for name in COLOURS if name in named]
    colours = maps[[list(COLOURS).index(name) for name in names]]
    with torch.no_grad():  # only what the taken places show has a gradient
        over = overlaps(colours, paint)
        best = over.amax(2)  # of all radii: [colours, 6, H, W]
        rows = F.max_pool2d(best, (2 * NEAR + 1, 1), 1, (NEAR, 0))  # one way after the other: a fifth of the work
        compared = F.max_pool2d(rows, (1, 2 * NEAR + 1), 1, (0, NEAR))
        taken = _places(best * (SHARPNESS * compared).softmax(1), over, claims, slots, names)
    shown = sum(_credit(over[place[1]], colours[place[1]], paint, SHAPES.index(claims.objects[place[0]].shape), place)
                for place in taken)
    outside = torch.stack([_distance(place, paint) > REACH * place[-1] + 1.5 for place in taken]).all(0)
    elsewhere = (paint * outside.to(paint)).sum() / OBJECT
    return _direction(colours, taken, claims) * shown / (len(slots) + elsewhere)


def _credit(over: Tensor, colour: Tensor, paint: Tensor, claimed: int, place: "Place") -> Tensor:
    """Overlap of the claimed shape at a place, times its probability beside the other shapes around."""
    y, x = place[2:4]
    top, left = max(y - NEAR, 0), max(x - NEAR, 0)
    window = over[..., top:y + NEAR + 1, left:x + NEAR + 1]
    best = [np.unravel_index(int(each.argmax()), each.shape) for each in window]
    compared = torch.stack([overlap(colour, paint, shape, int(radius), top + int(down), left + int(right))
                            for shape, (radius, down, right) in enumerate(best)])
    own = overlap(colour, paint, claimed, int(over[claimed, :, y, x].argmax()), y, x)
    return own * (SHARPNESS * compared).softmax(0)[claimed]


Place = tuple[int, int, int, int, float]  # slot, colour, row, column, radius


def _places(credit: Tensor, over: Tensor, claims: Claims, slots: list[int], names: list[str]) -> list[Place]:
    """Places of the claimed objects, the best credited first; each place is used once."""
    free, left, taken = torch.ones_like(credit[0, 0]), list(slots), []
    while left:
        best: dict[int, tuple[float, int, int, int]] = {}
        for slot in set(left):
            claim = claims.objects[slot]
            at = [row for row, name in enumerate(names) if claim.colour in (None, name)]
            free_credit = credit[at, SHAPES.index(claim.shape)] * free
            index = [int(i) for i in np.unravel_index(int(free_credit.argmax()), free_credit.shape)]
            best[slot] = float(free_credit[tuple(index)]), at[index[0]], index[1], index[2]
        slot = max(best, key=lambda candidate: best[candidate][0])
        _, colour, y, x = best[slot]
        radius = RADII[int(over[colour, SHAPES.index(claims.objects[slot].shape), :, y, x].argmax())]
        taken.append((slot, colour, y, x, radius))
        left.remove(slot)
        free = free * (_distance(taken[-1], free) > APART * radius)
    return taken


def _distance(place: Place, like: Tensor) -> Tensor:
    """Every pixel's distance from a place: [H, W]."""
    axis = torch.arange(SIZE, device=like.device, dtype=like.dtype)
    return torch.hypot(axis[:, None] - place[2], axis[None, :] - place[3])


def _direction(colours: Tensor, taken: list[Place], claims: Claims) -> Tensor | float:
    """Credit of a relation: the worst pair of a first and another object; 1.0 if none is claimed."""
    if claims.relation is None:
        return 1.0
    centres: dict[int, list[Tensor]] = defaultdict(list)  # (x, y) of a place's colour around it
    axis = torch.arange(SIZE, device=colours.device, dtype=colours.dtype)
    for place in taken:
        mass = colours[place[1]] * (_distance(place, colours) <= REACH * place[-1])
        centroid = torch.stack([mass.sum(0) @ axis, mass.sum(1) @ axis]) / (mass.sum() + 1e-3)
        centres[place[0]].append(centroid)
    line = torch.stack([first - other for first in centres[0] for other in centres[1]])
    cosine = line @ line.new_tensor(RELATIONS[claims.relation]) / (line.norm(dim=1) + 1e-3)
    if claims.objects[0] == claims.objects[1]:
        cosine = cosine.abs()  # either may be the first
    way, holds = ((1 + cosine) / (1 + TRUE)).clamp(max=1), ((cosine - TRUE) / TURN).sigmoid()
    return FLOOR + (1 - FLOOR) * ((way + holds) / 2).amin()


def gradients(images: np.ndarray) -> np.ndarray:
    """Histograms [B, 12], each of sum 1, of the gradients' lengths in images [B, 3, H, W], in sRGB per pixel."""
    across, down = np.diff(images, axis=3)[:, :, :-1], np.diff(images, axis=2)[:, :, :, :-1]
    lengths = np.hypot(across, down).mean(1)
    return np.stack([np.histogram(each, BOUNDS)[0] / each.size for each in lengths])


@cache
def reference() -> tuple[np.ndarray, float]:
    """Mean histogram [12] and the mean edge width of rendered scenes, their tasks in turn."""
    rng = np.random.default_rng(SEED)
    tasks = (scenes.TASKS[i % len(scenes.TASKS)] for i in range(RENDERED))
    rendered = np.stack([scenes.render(scenes.sample_claims(rng, task), rng) for task in tasks]).transpose(0, 3, 1, 2)
    return gradients(rendered).mean(0), _widths(rendered).mean().item()


def _widths(images: np.ndarray) -> Tensor:
    return widths_of(torch.from_numpy(images)).nanmean(1)


@built_in("scene_style", "style look", ABOUT)
def scene_style(images: Tensor | np.ndarray, prompts: Sequence[str]) -> list[float]:
    """Closeness in [0, 1] of an image's edges to those of rendered scenes, whatever it shows.

    It is the Bhattacharyya coefficient, sum sqrt(p q), of two histograms of gradients, times the edge width of rendered
    scenes over the image's where that is larger: see `guards.widths_of`. Rendered scenes have 0.98, the starter's
    images 0.72; blurred by 1 pixel 0.47 and 0.46; with noise of std 0.03 rendered ones have 0.17.

    images: float [B, 3, H, W] in [0, 1].
    Raises ValueError for images of another shape.
    """
    images = torch.as_tensor(images).detach().to("cpu", torch.float32).numpy()
    if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[2:]) < 2:
        raise ValueError(f"the reward scene_style got images of shape {list(images.shape)}, expected [B, 3, H, W]")
    histogram, width = reference()
    wider = (_widths(images) / width).nan_to_num(1.0).clamp(min=1)
    return (np.sqrt(gradients(images) * histogram).sum(1) / wider.numpy()).tolist()
