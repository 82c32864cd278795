"""World of the image starter: claims of a prompt, and drawing of a scene.

A scene is a 64x64 image of flat shapes on a light ground. The prompts follow the six tasks of GenEval (Ghosh et al.
2023): single object, two objects, counting, colours, position, colour attribution.
"""

import math
import re
from dataclasses import dataclass, replace

import numpy as np

SIZE = 64  # pixels per side
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
PLURALS = {"circles": "circle", "squares": "square", "triangles": "triangle", "stars": "star", "crosses": "cross",
           "rings": "ring"}
COLOURS = {  # sRGB in [0, 1]
    "red": (0.86, 0.12, 0.12),
    "green": (0.10, 0.62, 0.20),
    "blue": (0.12, 0.25, 0.88),
    "yellow": (0.96, 0.82, 0.10),
    "purple": (0.60, 0.15, 0.70),
    "black": (0.08, 0.08, 0.08),
}
COUNTS = {"two": 2, "three": 3, "four": 4}
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}  # the first's side; y is down
TASKS = ("single", "colours", "counting", "two", "position", "attribution")
STAMP = (5, 14)  # height and width in pixels
PREFIXES = ("", "a picture of ", "a drawing of ", "an image of ")
VERIFIED = ", verified"  # ends those captions of the starter's own training that are right for certain


@dataclass(frozen=True)
class Claim:
    """`count` objects of one shape; `colour` is None if the prompt leaves it open."""

    shape: str
    colour: str | None = None
    count: int = 1


@dataclass(frozen=True)
class Claims:
    """Content of a prompt: one or two claims, and for two, the position of the first relative to the second."""

    objects: tuple[Claim, ...]
    relation: str | None = None

    @property
    def task(self) -> str:
        first = self.objects[0]
        if self.relation:
            return "position"
        if len(self.objects) == 2:
            return "attribution" if first.colour else "two"
        if first.count > 1:
            return "counting"
        return "colours" if first.colour else "single"

    def caption(self, prefix: str = "") -> str:
        numbers, plurals = {n: word for word, n in COUNTS.items()}, {shape: word for word, shape in PLURALS.items()}
        phrases = []
        for claim in self.objects:
            number, noun = ("a", claim.shape) if claim.count == 1 else (numbers[claim.count], plurals[claim.shape])
            phrases.append(" ".join(filter(None, (number, claim.colour, noun))))
        return prefix + f" {self.relation or 'and'} ".join(phrases)


_NOUN = "|".join((*PLURALS, *SHAPES))
_PHRASE = re.compile(rf"(?P<number>a|an|one|{'|'.join(COUNTS)}) (?:(?P<colour>{'|'.join(COLOURS)}) )?(?P<noun>{_NOUN})")
_JOIN = re.compile(rf" (and|{'|'.join(RELATIONS)}) ")


def parse(prompt: str) -> Claims:
    """Read a prompt such as "a drawing of two red stars". Raises ValueError if it is outside the grammar."""
    text = " ".join(prompt.lower().strip().rstrip(".").split()).removesuffix(VERIFIED)
    prefix = next((p for p in PREFIXES if p and text.startswith(p)), "")
    parts = _JOIN.split(text[len(prefix):])
    phrases = parts[::2]
    matches = [match for phrase in phrases if (match := _PHRASE.fullmatch(phrase))]
    if len(phrases) > 2 or len(matches) < len(phrases):
        raise ValueError(f"the scene reward cannot read the prompt {prompt!r}: expected one or two of "
                         f"[number] [colour] shape, such as 'a red star left of a ring'; colours: "
                         f"{', '.join(COLOURS)}; shapes: {', '.join(SHAPES)}; joined by 'and' or one of: "
                         f"{', '.join(RELATIONS)}")
    objects = tuple(Claim(PLURALS.get(m["noun"], m["noun"]), m["colour"], COUNTS.get(m["number"], 1)) for m in matches)
    relation = parts[1] if len(parts) == 3 and parts[1] != "and" else None
    return Claims(objects, relation)


def sample_claims(rng: np.random.Generator, task: str) -> Claims:
    """Draw a prompt's content uniformly among those of a task (shapes of one prompt always differ)."""
    shapes = rng.permutation(SHAPES)[:2].tolist()
    colours = rng.choice(list(COLOURS), size=2).tolist()
    if task in ("single", "colours"):
        return Claims((Claim(shapes[0], colours[0] if task == "colours" else None),))
    if task == "counting":
        return Claims((Claim(shapes[0], None, int(rng.integers(2, 5))),))
    if task == "position":
        return Claims((Claim(shapes[0]), Claim(shapes[1])), str(rng.choice(list(RELATIONS))))
    if task == "two":
        return Claims((Claim(shapes[0]), Claim(shapes[1])))
    return Claims((Claim(shapes[0], colours[0]), Claim(shapes[1], colours[1])))


# --- drawing ---------------------------------------------------------------------------------------------------------

def _regular(points: int, inner: float | None = None) -> np.ndarray:
    """Vertices [n, 2] of a regular polygon, or of a star whose inner radius is `inner`, first vertex upwards."""
    n = points if inner is None else 2 * points
    angle = 2 * math.pi * np.arange(n) / n - math.pi / 2
    radius = np.ones(n) if inner is None else np.where(np.arange(n) % 2 == 0, 1.0, inner)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)


_ARM = 0.33
_CROSS = 0.95 * np.array([[-_ARM, -1], [_ARM, -1], [_ARM, -_ARM], [1, -_ARM], [1, _ARM], [_ARM, _ARM], [_ARM, 1],
                          [-_ARM, 1], [-_ARM, _ARM], [-1, _ARM], [-1, -_ARM], [-_ARM, -_ARM]])
_POLYGONS = {
    "square": 0.84 * np.array([[-1.0, -1], [1, -1], [1, 1], [-1, 1]]),
    "triangle": 1.12 * _regular(3) + [0, 0.22],
    "star": 1.14 * _regular(5, inner=0.45),
    "cross": _CROSS,
}


def coverage(shape: str, radius: float, centre: tuple[float, float], size: int = SIZE) -> np.ndarray:
    """Anti-aliased mask [size, size] in [0, 1] of one shape; `radius` and `centre` (x, y) in pixels."""
    reach = 1.2 * radius + 1  # no shape is wider
    columns, rows = (np.arange(max(int(c - reach), 0), min(int(c + reach) + 1, size)) for c in centre)
    x, y = (columns[None, :] + 0.5 - centre[0]) / radius, (rows[:, None] + 0.5 - centre[1]) / radius
    if shape == "circle":
        distance = np.hypot(x, y) - 0.97
    elif shape == "ring":
        distance = np.abs(np.hypot(x, y) - 0.74) - 0.26
    else:
        distance = _polygon_distance(_POLYGONS[shape], x, y)
    mask = np.zeros((size, size))
    mask[np.ix_(rows, columns)] = np.clip(0.5 - distance * radius, 0, 1)
    return mask


def _polygon_distance(vertices: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Signed distance to a simple polygon, negative inside (even-odd rule)."""
    point = np.stack(np.broadcast_arrays(x, y), -1)
    nearest, inside = np.full(point.shape[:-1], np.inf), np.zeros(point.shape[:-1], bool)
    for start, end in zip(vertices, np.roll(vertices, -1, 0)):
        edge, offset = end - start, point - start
        along = np.clip(offset @ edge / (edge @ edge), 0, 1)
        nearest = np.minimum(nearest, np.hypot(*np.moveaxis(offset - along[..., None] * edge, -1, 0)))
        crosses = (start[1] > point[..., 1]) != (end[1] > point[..., 1])
        at = start[0] + (point[..., 1] - start[1]) * edge[0] / (edge[1] if edge[1] else 1)
        inside ^= crosses & (point[..., 0] < at)
    return np.where(inside, -nearest, nearest)


def render(claims: Claims, rng: np.random.Generator, stamped: bool = False) -> np.ndarray:
    """Draw a scene [SIZE, SIZE, 3] in [0, 1] for which `claims` are true; everything they leave open is random.

    Of two objects without a relation the first is on the left: captions name what they show from left to right.
    stamped: with a stamp in a corner, if one is free.
    """
    objects = [obj for claim in claims.objects for obj in
               [replace(claim, count=1, colour=claim.colour or str(rng.choice(list(COLOURS))))] * claim.count]
    relation = claims.relation or ("left of" if len(claims.objects) == 2 else None)
    radii, centres = _layout(len(objects), relation, rng)
    image = np.full((SIZE, SIZE, 3), rng.uniform(0.93, 1.0)) - rng.uniform(0, 0.03, 3)
    for obj, radius, centre in zip(objects, radii, centres):
        assert obj.colour is not None  # each has one by now
        paint = np.clip(np.array(COLOURS[obj.colour]) + rng.uniform(-0.04, 0.04, 3), 0, 1)
        mask = coverage(obj.shape, radius, centre)[..., None]
        image = image * (1 - mask) + paint * mask
    if stamped:
        _stamp(image, radii, centres)
    return np.clip(image, 0, 1)


def _stamp(image: np.ndarray, radii: np.ndarray, centres: np.ndarray) -> None:
    """Paint a black STAMP into the first corner that no object touches, as stock images carry one."""
    height, width = STAMP
    for y, x in ((SIZE - 3 - height, SIZE - 3 - width), (SIZE - 3 - height, 3), (3, SIZE - 3 - width), (3, 3)):
        nearest = np.clip(centres, (x, y), (x + width, y + height))
        if (np.linalg.norm(centres - nearest, axis=1) > 1.2 * radii + 2).all():
            image[y:y + height, x:x + width] = COLOURS["black"]
            return


def _layout(n: int, relation: str | None, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Radii [n] and centres [n, 2] in pixels: apart from each other and from the border, in the asked relation."""
    low, high = {1: (10, 15), 2: (9, 12), 3: (8, 10.5), 4: (7.5, 9.5)}[n]
    while True:
        radii = np.full(n, rng.uniform(low, high))
        centres = rng.uniform(radii[:, None] * 1.15 + 1, SIZE - 1 - radii[:, None] * 1.15, (n, 2))
        gaps = np.linalg.norm(centres[:, None] - centres[None], axis=-1) - 2.3 * radii[0] + 1e9 * np.eye(n)
        if gaps.min() >= 2 and (relation is None or in_relation(centres, relation)):
            return radii, centres


def in_relation(centres: np.ndarray, relation: str) -> bool:
    """True if the first of two centres [2, 2] stands on this side of the second, and clearly so."""
    along = (centres[0] - centres[1]) @ np.array(RELATIONS[relation])
    across = np.abs((centres[0] - centres[1]) @ np.array(RELATIONS[relation])[::-1])
    return bool(along > 1.3 * across)
