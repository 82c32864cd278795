"""World of the text starter: sums of two to five numbers with their partial sums, and a careless pupil.

A problem is `12+34+56=`, its solution `46;102`, its answer `102`. Held-out problems are never shown with any solution,
to the model or to its alignment. A hash of the numbers, in any order, selects them, so no file is needed.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

SMALLEST, LARGEST = 10, 99  # numbers of a problem
COUNTS = {2: 7, 3: 6, 4: 4, 5: 3}  # weight of problems with so many numbers
# How often the pupil slips in a digit fact; the 45 facts, in the order of a hash, take these in turn.
RATES = (0.01,) * 8 + (0.3,) * 3 + (0.6,) * 2 + (0.7, 0.9)


@dataclass(frozen=True)
class Problem:
    """Sum of two to five numbers from 10 to 99."""

    numbers: tuple[int, ...]

    @property
    def prompt(self) -> str:
        return "+".join(map(str, self.numbers)) + "="

    @property
    def steps(self) -> list[int]:
        """Partial sums, the answer last."""
        return [*accumulate(self.numbers)][1:]

    @property
    def answer(self) -> int:
        return sum(self.numbers)

    @property
    def task(self) -> str:
        return f"{len(self.numbers)} numbers"

    @property
    def held_out(self) -> bool:
        """True for one set of numbers in ten, whatever their order."""
        return zlib.crc32("+".join(map(str, sorted(self.numbers))).encode()) % 10 == 0

    def careless(self, dice: random.Random) -> list[int]:
        """Partial sums of the careless pupil, who goes on from a wrong one."""
        return self._with_slips(lambda rate: dice.random() < rate)

    @property
    def usual(self) -> list[int]:
        """Partial sums with every slip that the pupil makes more often than not."""
        return self._with_slips(lambda rate: rate > 0.5)

    def _with_slips(self, slips: Callable[[float], bool]) -> list[int]:
        def add(total: int, number: int) -> int:
            # Units and tens of both; zeros are added without fault.
            pairs = [(ten, sorted((total // ten % 10, number // ten % 10))) for ten in (1, 10)]
            facts = [(ten, *FACTS[a, b]) for ten, (a, b) in pairs if a]
            return total + number + sum(ten * slip for ten, rate, slip in facts if slips(rate))

        return [*accumulate(self.numbers, add)][1:]


def solution(steps: Sequence[int]) -> str:
    """Partial sums as the model writes them."""
    return ";".join(map(str, steps))


def _facts() -> dict[tuple[int, int], tuple[float, int]]:
    """(rate, slip) by digits a <= b, from 1 to 9: the pupil's a + b is wrong by the slip. A slip is one too few, one
    too many or, of a fact with a carry, the carry forgotten."""
    facts = sorted(((a, b) for a in range(1, 10) for b in range(a, 10)),
                   key=lambda fact: zlib.crc32("{}+{}".format(*fact).encode()))
    slips = ((-1, 1), (-10, -1, 1))
    kinds = [slips[a + b > 9] for a, b in facts]
    return {fact: (RATES[i % len(RATES)], kind[i // len(RATES) % len(kind)])
            for i, (fact, kind) in enumerate(zip(facts, kinds))}


FACTS = _facts()


def draw(dice: random.Random, held_out: bool, count: int | None = None) -> Problem:
    """Random problem of one side of the split; count: how many numbers it has."""
    count = count or dice.choices([*COUNTS], [*COUNTS.values()])[0]
    while True:
        problem = Problem(tuple(dice.randint(SMALLEST, LARGEST) for _ in range(count)))
        if problem.held_out == held_out:
            return problem


def choose_problems(held_out: bool, count: int, seed: int) -> list[Problem]:
    """`count` different problems of one side, those with few numbers first."""
    dice, problems = random.Random(seed), set[Problem]()
    while len(problems) < count:
        problems.add(draw(dice, held_out))
    return sorted(problems, key=lambda problem: (len(problem.numbers), problem.numbers))
