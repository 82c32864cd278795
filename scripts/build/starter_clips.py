"""Clips of the video starter's world: drawing, and which prompts are held out."""

from itertools import product

import numpy as np

from flowgrpo.starter.motion import MOTIONS, PHRASES, Clip
from flowgrpo.starter.scenes import COLOURS, SHAPES, SIZE, coverage

FRAMES = 5
STYLES = len(PHRASES["stay"])  # ways to say the same
TASKS = ("direction", "size", "still")
SPEED = (3.0, 4.5)  # pixels per frame
GROWTH = (0.10, 0.14)  # change of the radius' logarithm per frame
RADIUS = (9.0, 12.0)  # pixels, of a shape of constant size
SMALL = (7.8, 8.4)  # pixels, of a growing shape in its first frame and a shrinking one in its last
JOLT = (5.0, 8.0)  # pixels


def is_held_out(clip: Clip) -> bool:
    """True for one clip in six: neither the starter's own training nor any alignment may see it. Of every shape, colour
    and motion, and of every pair of these, five in six are seen in other combinations."""
    places = SHAPES.index(clip.shape), list(COLOURS).index(clip.colour), list(MOTIONS).index(clip.motion)
    return sum(places) % 6 == 0


def clips(held: bool) -> list[Clip]:
    every = (Clip(shape, colour, motion) for motion, shape, colour in product(MOTIONS, SHAPES, COLOURS))
    return [clip for clip in every if is_held_out(clip) == held]


# --- drawing ---------------------------------------------------------------------------------------------------------

def render(clip: Clip, rng: np.random.Generator, jolted: bool = False) -> np.ndarray:
    """Draw frames [FRAMES, 3, SIZE, SIZE] in [0, 1] for which `clip` is true; place, pace and size are random. jolted:
    as filmed by hand: from one frame on everything is shifted by some pixels, so the clip is not true."""
    centres, radii = _path(clip.motion, rng, jolted)
    ground = rng.uniform(0.93, 1.0) - rng.uniform(0, 0.03, 3)
    paint = np.clip(np.array(COLOURS[clip.colour]) + rng.uniform(-0.04, 0.04, 3), 0, 1)
    masks = np.stack([_mask(clip.shape, radius, centre) for centre, radius in zip(centres, radii)])[:, None]
    return np.clip(ground[:, None, None] * (1 - masks) + paint[:, None, None] * masks, 0, 1)


def _path(motion: str, rng: np.random.Generator, jolted: bool) -> tuple[np.ndarray, np.ndarray]:
    """Centres [FRAMES, 2] and radii [FRAMES] in pixels, well inside the frame."""
    x, y, size = MOTIONS[motion]
    time = np.arange(FRAMES)
    while True:
        pace, growth = rng.uniform(*SPEED), size * rng.uniform(*GROWTH)
        first = rng.uniform(*SMALL) * np.exp(-min(growth, 0) * (FRAMES - 1)) if size else rng.uniform(*RADIUS)
        radii = first * np.exp(growth * time)
        centres = rng.uniform(0, SIZE, 2) + pace * time[:, None] * np.array([x, y])
        if jolted:
            angle = rng.uniform(0, 2 * np.pi)
            centres += rng.uniform(*JOLT) * np.outer(time >= rng.integers(1, FRAMES), [np.cos(angle), np.sin(angle)])
        border = radii[:, None] * 1.15 + 1
        if (centres >= border).all() and (centres <= SIZE - border).all():
            return centres, radii


def _mask(shape: str, radius: float, centre: np.ndarray) -> np.ndarray:
    side = 2 * int(np.ceil(1.25 * radius)) + 2
    left, top = np.clip(np.floor(centre).astype(int) - side // 2, 0, SIZE - side)
    mask = np.zeros((SIZE, SIZE))
    mask[top:top + side, left:left + side] = coverage(shape, radius, (centre[0] - left, centre[1] - top), side)
    return mask
