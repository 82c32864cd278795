"""Write the arithmetic of our own: word_problems and arithmetic, with their training sides, in flowgrpo/data/packaged.

    python scripts/build/build_word_problems.py

Problems in the manner of GSM8K, for a small language model: five kinds of one step, three of two, numbers below 100.
Every sentence and every word is from the lists below; none comes from GSM8K. `arithmetic` asks for a sum, a difference
or a product of two numbers. The same on every run. No held-out problem has the kind and the numbers of a training
problem, whatever its words.
"""

import json
import random
from collections.abc import Callable
from typing import Any

from flowgrpo.data import sets

COUNTS = {"word_problems_train": 800, "word_problems": 200, "arithmetic_train": 800, "arithmetic": 200}
NAMES = ("Ada", "Ben", "Carla", "Dev", "Elena", "Finn", "Grace", "Hugo", "Iris", "Jonas", "Kira", "Liam", "Mona",
         "Nils", "Olga", "Paul", "Rosa", "Samir", "Tara", "Viktor")
THINGS = ("apples", "books", "buttons", "cards", "coins", "cups", "eggs", "keys", "marbles", "oranges", "pencils",
          "plates", "shells", "stamps", "stickers", "stones")
BOXES = (("bag", "bags"), ("basket", "baskets"), ("box", "boxes"), ("crate", "crates"), ("tray", "trays"))
GOODS = (("pen", "notebook"), ("sandwich", "juice"), ("rose", "vase"), ("ball", "racket"), ("stamp", "letter"),
         ("candle", "lamp"))
SUMS = ("What is {} + {}?", "What is {} plus {}?", "Add {} and {}.")
DIFFERENCES = ("What is {} - {}?", "What is {} minus {}?", "Take {1} from {0}.")
PRODUCTS = ("What is {} * {}?", "What is {} times {}?", "Multiply {} by {}.")
ANSWER = "Answer with a number."  # as a system message it takes the place of the model's own
MULTIPLES = ((2, "twice"), (3, "three times"), (4, "four times"))
Numbers = tuple[int, ...]
Draw = Callable[[random.Random], tuple[Numbers, str, int]]  # the numbers, the problem in words, and its answer


def gained(dice: random.Random) -> tuple[Numbers, str, int]:
    """Return a sum."""
    (one, two), things = dice.sample(NAMES, 2), dice.choice(THINGS)
    a, b = dice.randint(3, 40), dice.randint(2, 30)
    return (a, b), f"{one} has {a} {things}. {two} gives {one} {b} more. How many {things} does {one} have now?", a + b


def packed(dice: random.Random) -> tuple[Numbers, str, int]:
    """Return a product."""
    name, (box, boxes), things = dice.choice(NAMES), dice.choice(BOXES), dice.choice(THINGS)
    a, b = dice.randint(2, 15), dice.randint(2, 12)
    return (a, b), f"A {box} holds {b} {things}. {name} buys {a} full {boxes}. How many {things} is that?", a * b


def bought(dice: random.Random) -> tuple[Numbers, str, int]:
    """Return a product and a number more."""
    name, (cheap, dear) = dice.choice(NAMES), dice.choice(GOODS)
    a, b, c = dice.randint(2, 9), dice.randint(2, 9), dice.randint(5, 30)
    return (a, b, c), (f"A {cheap} costs {b} dollars and a {dear} costs {c} dollars. {name} buys {a} of the first and "
                       "one of the second. How many dollars does that cost?"), a * b + c


def shared(dice: random.Random) -> tuple[Numbers, str, int]:
    """Return a quotient."""
    name, things = dice.choice(NAMES), dice.choice(THINGS)
    a, b = dice.randint(2, 12), dice.randint(2, 8)
    return (a * b, b), (f"{b} children share {a * b} {things} equally. {name} is one of them. How many {things} does "
                        f"{name} get?"), a


def read(dice: random.Random) -> tuple[Numbers, str, int]:
    """Return a difference."""
    name, a = dice.choice(NAMES), dice.randint(5, 60)
    b = dice.randint(a + 1, 99)
    return (a, b), f"A book has {b} pages. {name} reads {a} of them. How many pages are left?", b - a


def together(dice: random.Random) -> tuple[Numbers, str, int]:
    """Return a number and its multiple together."""
    (one, two), things, (times, said) = dice.sample(NAMES, 2), dice.choice(THINGS), dice.choice(MULTIPLES)
    a = dice.randint(3, 19)
    return (a, times), (f"{one} has {a} {things}. {two} has {said} as many. How many {things} do they have "
                        "together?"), a * (1 + times)


def aged(dice: random.Random) -> tuple[Numbers, str, int]:
    """Return a sum of years."""
    one, two = dice.sample(NAMES, 2)
    a, b = dice.randint(4, 60), dice.randint(2, 30)
    return (a, b), f"{one} is {a} years old. {two} is {b} years older than {one}. How old is {two}?", a + b


def paid(dice: random.Random) -> tuple[Numbers, str, int]:
    """Return the change of a purchase."""
    name, a, b = dice.choice(NAMES), dice.randint(2, 6), dice.randint(2, 12)
    c = next(note for note in (20, 50, 99) if note > a * b)
    return (a, b, c), (f"{name} buys {a} tickets at {b} dollars each and pays with {c} dollars. How many dollars does "
                       f"{name} get back?"), c - a * b


def sum_of(dice: random.Random) -> tuple[Numbers, str, int]:
    """Return a sum, asked for without a story."""
    a, b = dice.randint(2, 30), dice.randint(2, 20)
    return (a, b), f"{dice.choice(SUMS).format(a, b)} {ANSWER}", a + b


def difference_of(dice: random.Random) -> tuple[Numbers, str, int]:
    """Return a positive difference."""
    b = dice.randint(2, 20)
    a = b + dice.randint(1, 30)
    return (a, b), f"{dice.choice(DIFFERENCES).format(a, b)} {ANSWER}", a - b


def product_of(dice: random.Random) -> tuple[Numbers, str, int]:
    """Return a product of small numbers."""
    a, b = dice.randint(2, 20), dice.randint(2, 12)
    return (a, b), f"{dice.choice(PRODUCTS).format(a, b)} {ANSWER}", a * b


BARE: dict[str, Draw] = {"sum": sum_of, "difference": difference_of, "product": product_of}
KINDS: dict[str, Draw] = {"gained": gained, "packed": packed, "bought": bought, "shared": shared, "read": read,
                          "together": together, "aged": aged, "paid": paid}


def build() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each file by its name: the kinds in turn, held-out ones first."""
    return of("word_problems", KINDS) | of("arithmetic", BARE)


def of(name: str, kinds: dict[str, Draw]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a set's two files."""
    dice, seen, rows = random.Random(0), set[tuple[str, Numbers]](), dict[str, list[dict[str, Any]]]()
    for name in (name, f"{name}_train"):
        held_out, rows[name] = frozenset(seen), []
        while len(rows[name]) < COUNTS[name]:
            kind = list(kinds)[len(rows[name]) % len(kinds)]
            numbers, prompt, answer = kinds[kind](dice)
            if (kind, numbers) in held_out or any(row["prompt"] == prompt for row in rows[name]):
                continue
            seen.add((kind, numbers))
            rows[name].append({"prompt": prompt, "metadata": {"answer": str(answer), "category": kind}})
    return rows


def main() -> None:
    """Write both files."""
    for name, rows in build().items():
        (sets.FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{name}: {len(rows)} problems")


if __name__ == "__main__":
    main()
