"""World of the unified starter: scenes of the image starter's shapes and colours on a lattice, as 8 x 8 image tokens.

All objects have one radius and stand on corners of tokens, so that an object is four tokens and the ground one: a
image and its tokens determine each other.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from flowgrpo.starter import scenes
from flowgrpo.starter.scenes import COLOURS, SHAPES, Claims

SIDE = 8  # tokens per side
CELL = scenes.SIZE // SIDE  # pixels per side of a token
RADIUS = 7.0  # pixels
GROUND = 0.965
APART = 2.3 * RADIUS + 2  # of centres, at least

Placed = tuple[str, str, tuple[int, int]]  # shape, colour, centre (x, y) in pixels


def place(claims: Claims, rng: np.random.Generator) -> list[Placed]:
    """Objects of a scene for which `claims` are true; everything they leave open is random. Of two objects without a
    relation the first is on the left, as in `scenes.render`."""
    named = [(claim.shape, claim.colour or str(rng.choice(list(COLOURS))))
             for claim in claims.objects for _ in range(claim.count)]
    relation = claims.relation or ("left of" if len(claims.objects) == 2 else None)
    while True:
        centres = CELL * rng.integers(1, SIDE, (len(named), 2))
        gaps = np.linalg.norm(centres[:, None] - centres[None], axis=-1) + 1e9 * np.eye(len(named))
        if gaps.min() >= APART and (relation is None or scenes.in_relation(centres, relation)):
            return [(shape, colour, (int(x), int(y))) for (shape, colour), (x, y) in zip(named, centres)]


def paint(objects: Sequence[Placed]) -> np.ndarray:
    """Image float32 [3, 64, 64] in [0, 1]."""
    image = np.full((3, scenes.SIZE, scenes.SIZE), GROUND, np.float32)
    for shape, colour, (x, y) in objects:
        mask = np.roll(_mask(shape), (y - scenes.SIZE // 2, x - scenes.SIZE // 2), (0, 1))
        image = image * (1 - mask) + np.array(COLOURS[colour], np.float32)[:, None, None] * mask
    return image


@lru_cache(maxsize=len(SHAPES))
def _mask(shape: str) -> np.ndarray:
    return scenes.coverage(shape, RADIUS, (scenes.SIZE // 2, scenes.SIZE // 2)).astype(np.float32)
