"""Every question about an image of the starter's world, and its right answer for the objects that are there.

The questions are those of `questions.of_claims`, of any claims, and besides "Is there a red ring in the picture?" and
"Is the ring above the cross?". One that supposes what is not so, such as for the colour of a star where there is none,
has no right answer.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np

from flowgrpo.contrib.questions.questions import NUMBERS, PLACES, Question, of_claims, of_clauses
from flowgrpo.rewards.geneval.colours import NAMES
from flowgrpo.rewards.starter.scene import Reading
from flowgrpo.starter.scenes import COLOURS, COUNTS, PLURALS, RELATIONS, SHAPES, Claim, Claims

COUNTED = NUMBERS[:7]  # up to two more than a prompt asks for


@dataclass(frozen=True)
class Thing:
    """Object in an image; its centre is (x, y) in pixels, y down. shape: None for a blob that is none of the six;
    colour: None for none of the palette."""

    shape: str | None
    colour: str | None
    centre: tuple[float, float]


Things = Sequence[Thing]


def things(reading: Reading) -> list[Thing]:
    return [Thing(each.shape, each.colour, each.centre) for each in reading.objects]


def all_questions() -> list[Question]:
    """All questions once, with the answers to choose from; which one stands as the answer says nothing."""
    claimed = [Claims((Claim(shape, "red", count),)) for shape in SHAPES for count in (1, *COUNTS.values())]
    claimed += [Claims((Claim(a), Claim(b)), "above") for a, b in permutations(SHAPES, 2)]
    found = [each for claims in claimed for each in of_claims(claims)]
    found += of_clauses({"include": [{"class": f"{colour} {shape}"} for colour in COLOURS for shape in SHAPES]})
    found += [Question(f"Is the {a} {relation} the {b}?", "yes")
              for a, b in permutations(SHAPES, 2) for relation in RELATIONS]
    return list({each.question: each for each in found}.values())


_NOUN = "|".join((*PLURALS, *SHAPES))  # the longer first
_FORMS = {
    "exists": rf"Is there an? (?:({'|'.join(COLOURS)}) )?({_NOUN}) in the picture\?",
    "total": r"How many things are in the picture\?",
    "count": rf"How many ({_NOUN}) are in the picture\?",
    "colour": rf"What color (?:is|are) the ({_NOUN})\?",
    "where": rf"Where (?:is|are) the ({_NOUN}), seen from the ({_NOUN}): left, right, above or below\?",
    "related": rf"Is the ({_NOUN}) ({'|'.join(RELATIONS)}) the ({_NOUN})\?"}
KINDS = tuple(_FORMS)
CHOICES = {"exists": ("yes", "no"), "total": COUNTED, "count": COUNTED, "colour": NAMES,
           "where": tuple(PLACES.values()), "related": ("yes", "no")}  # all that a network learns to choose from


def read_question(text: str) -> tuple[str, Callable[[Things], str | None]]:
    """Its kind, and what tells the right answer of the objects of an image, None for none. ValueError for a question
    of another form."""
    for kind, form in _FORMS.items():
        if match := re.fullmatch(form, text):
            said = [PLURALS.get(part, part) for part in match.groups()]
            return kind, lambda seen: _answer(kind, seen, *said)
    raise ValueError(f"no question about the starter's world: {text!r}")


def _answer(kind: str, seen: Things, *said: str) -> str | None:
    """Right answer to a question of a kind, by the groups of its form in `_FORMS`; None for none."""
    if kind == "exists":
        colour, shape = said
        return "yes" if any(each.shape == shape and colour in (None, each.colour) for each in seen) else "no"
    if kind in ("total", "count"):
        count = sum(each.shape in said for each in seen) if said else len(seen)
        return COUNTED[count] if count < len(COUNTED) else None
    if kind == "colour":
        colours = {each.colour for each in seen if each.shape == said[0]}
        return colours.pop() if len(colours) == 1 else None
    # The direction that is nearest to the line of centres, if all pairs have the same.
    first, other = said[0], said[-1]
    lines = [np.subtract(a.centre, b.centre) for a in seen if a.shape == first for b in seen if b.shape == other]
    found = {max(RELATIONS, key=lambda relation: line @ np.array(RELATIONS[relation])) for line in lines}
    if len(found) != 1:
        return None
    where = PLACES[found.pop()]
    return where if kind == "where" else "yes" if where == PLACES[said[1]] else "no"


Answer = Callable[[Things], str | None]


@lru_cache(maxsize=1)
def by_kind() -> dict[str, list[tuple[str, Answer]]]:
    """All questions by kind, with what tells their right answers; "exists" of plain and of coloured shapes are two."""
    kinds: dict[str, list[tuple[str, Answer]]] = {}
    for each in all_questions():
        kind, answer = read_question(each.question)
        coloured = kind == "exists" and any(f" {colour} " in each.question for colour in COLOURS)
        kinds.setdefault("exists, coloured" if coloured else kind, []).append((each.question, answer))
    return kinds


def sample_question(seen: Things, dice: random.Random, only: str = "") -> tuple[str, str]:
    """Question about an image, and its right answer: kinds are equally likely, then the answers that occur, then the
    questions with that answer. So neither a kind nor its usual answer tells much without the image.

    only: what the names of the kinds to ask begin with. Raises ValueError where none of them has an answer."""
    kinds = {name: asked for name, asked in by_kind().items() if name.startswith(only)}
    unanswered: set[str] = set()
    while len(unanswered) < len(kinds):
        of: dict[str, list[str]] = {}
        for question, answer in kinds[kind := dice.choice(list(kinds))]:
            if (said := answer(seen)) is not None:
                of.setdefault(said, []).append(question)
        if of:
            said = dice.choice(sorted(of))
            return dice.choice(of[said]), said
        unanswered.add(kind)
    raise ValueError(f"no question {only!r} about {seen} has an answer")
