"""Prompts of the image starter's world: which of them are held out, and wrong captions."""

import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from flowgrpo.starter.scenes import (
    COLOURS,
    COUNTS,
    PREFIXES,
    RELATIONS,
    SHAPES,
    Claims,
    sample_claims,
)

# Kept out of alignment, so that held-out prompts ask it for something new: every shape and every colour loses one pair,
# and each relation some ordered pairs of shapes. The starter's own training saw them, as a large model has seen most.
HELD_PAIRS = frozenset({("circle", "purple"), ("square", "yellow"), ("triangle", "black"), ("star", "red"),
                        ("cross", "green"), ("ring", "blue")})
HELD_RELATIONS = frozenset(
    (SHAPES[i], relation, SHAPES[(i + 1 + j) % 6]) for j, relation in enumerate(RELATIONS) for i in range(6))


def is_held_out(claims: Claims, prefix: str = "") -> bool:
    """True for prompts that no alignment may see."""
    if any((claim.shape, claim.colour) in HELD_PAIRS for claim in claims.objects):
        return True
    if claims.relation:
        return (claims.objects[0].shape, claims.relation, claims.objects[1].shape) in HELD_RELATIONS
    return zlib.crc32(claims.caption(prefix).encode()) % 8 == 0


def is_reserved(claims: Claims, prefix: str = "") -> bool:
    """True for prompts that no alignment trains on: the held-out ones, and a third more of tasks with few prompts."""
    few = claims.task in ("single", "counting", "two")
    return is_held_out(claims, prefix) or (few and zlib.crc32(claims.caption(prefix).encode()) % 3 == 0)


def sample_prompt(rng: np.random.Generator, task: str, held: bool, rule: Callable[[Claims, str], bool] = is_held_out
                  ) -> tuple[str, Claims]:
    """Draw one prompt of `task`, (caption, its claims), from the side of `rule` that `held` names."""
    while True:
        claims, prefix = sample_claims(rng, task), str(rng.choice(PREFIXES))
        if rule(claims, prefix) == held:
            return claims.caption(prefix), claims


# --- wrong captions ---------------------------------------------------------------------------------------------------

def misread(claims: Claims) -> Claims:
    """Claims with one mistake, of a careless annotator; the same claims always have the same mistake.

    The next shape, colour, number or side takes the right one's place; of two coloured objects in the order of COLOURS
    the colours are exchanged. No misreading leads back to its origin.
    """
    first, last = claims.objects[0], claims.objects[-1]
    if claims.relation:
        return replace(claims, relation=_next(list(RELATIONS), claims.relation))
    if claims.task == "counting":
        return Claims((replace(first, count=_next(list(COUNTS.values()), first.count)),))
    if claims.task in ("single", "two"):
        wrong = replace(last, shape=_next([s for s in SHAPES if s != first.shape or s == last.shape], last.shape))
        return Claims((*claims.objects[:-1], wrong))
    order = list(COLOURS)
    if last is not first and order.index(str(first.colour)) < order.index(str(last.colour)):
        return Claims((replace(first, colour=last.colour), replace(last, colour=first.colour)))
    return Claims((*claims.objects[:-1], replace(last, colour=_next(order, str(last.colour)))))


def _next(values: list, value: object) -> object:
    return values[(values.index(value) + 1) % len(values)]
