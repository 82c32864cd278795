"""Noun phrases of a prompt: from its metadata, or by spaCy; relations and numbers in them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flowgrpo.errors import UserError

NUMBERS = {word: number for number, words in enumerate(("a an one", "two", "three", "four", "five", "six", "seven",
                                                        "eight"), 1) for word in words.split()}
# The benchmark's words of place, in the order in which it looks for them.
RELATIONS = ("on side of", "next to", "near", "on the left of", "on the right of", "on the bottom of", "on the top of",
             "on top of")
IRREGULAR = {"knives": "knife", "mice": "mouse", "women": "woman", "men": "man", "children": "child",
             "people": "person", "shelves": "shelf", "leaves": "leaf", "wolves": "wolf", "loaves": "loaf",
             "scarves": "scarf", "feet": "foot", "teeth": "tooth", "geese": "goose", "buses": "bus", "lenses": "lens"}
SAME = frozenset("fish goldfish sheep deer shrimp scissors glasses skis bus dress glass grass octopus lens".split())
ARTICLE = re.compile(r"^(?:an?|the)\s+", re.IGNORECASE)
INSTALL = "pip install spacy && python -m spacy download en_core_web_sm"


@dataclass(frozen=True)
class Phrases:
    """Noun phrases of prompts, as T2I-CompBench finds them: by spaCy's `model`, loaded at the first prompt that needs
    it. Those of a prompt's metadata `noun_phrases`, a list of texts, come first."""

    model: str = "en_core_web_sm"

    def noun_phrases(self, prompt: str, metadata: dict[str, Any]) -> list[str]:
        """Raises UserError for metadata that are no list of texts, and without spaCy."""
        if "noun_phrases" not in metadata:
            return [chunk.text for chunk in self._read(prompt).noun_chunks]
        phrases = metadata["noun_phrases"]
        if not isinstance(phrases, list) or not all(isinstance(phrase, str) for phrase in phrases):
            raise UserError(f"the metadata of the prompt {prompt!r} has noun_phrases {phrases!r}: expected a list of "
                            "strings")
        return phrases

    def without_adjectives(self, prompt: str, metadata: dict[str, Any]) -> str:
        """Prompt without its adjectives, by its metadata under that name or by spaCy.
        Raises UserError without spaCy."""
        if "without_adjectives" in metadata:
            return str(metadata["without_adjectives"])
        return " ".join(token.text for token in self._read(prompt) if token.pos_ != "ADJ")

    @cached_property
    def _read(self) -> Any:
        try:
            import spacy

            return spacy.load(self.model)
        except (ImportError, OSError) as error:
            reason = " ".join(str(error).split())[:100]
            raise UserError(f"reward 't2i_compbench': no spaCy model {self.model} ({reason}): {INSTALL}; or give "
                            "each prompt the metadata noun_phrases: [...]") from None


def relation(prompt: str) -> str | None:
    """First of RELATIONS that a prompt names, None for none."""
    return next((words for words in RELATIONS if words in prompt.lower()), None)


def find_relation(prompt: str, phrases: Sequence[str] | None = None) -> tuple[str, str, str] | None:
    """Relation that a prompt names with the objects before and after it, without articles; None for none.

    phrases: noun phrases of a sentence, of which the nearest ones count; None for a prompt that has no other words.
    """
    words = relation(prompt)
    if words is None:
        return None
    before, _, after = prompt.lower().partition(words)
    if phrases is not None:
        lower = [phrase.lower() for phrase in phrases]
        left, right = [one for one in lower if one in before], [one for one in lower if one in after]
        if not left or not right:
            return None
        before, after = max(left, key=before.rfind), min(right, key=after.find)
        before, after = before.split()[-1], after.split()[-1]  # the nouns without their adjectives
    one, other = (ARTICLE.sub("", part.strip(" .,")) for part in (before, after))
    return words, one, other


def count_objects(phrases: Sequence[str]) -> list[tuple[str, int]]:
    """Objects that noun phrases count, in the singular, with their numbers: "three cats" is ("cat", 3)."""
    split = [phrase.lower().strip(" .,").partition(" ") for phrase in phrases]
    return [(singular(name) if NUMBERS[number] > 1 else name, NUMBERS[number])
            for number, _, name in split if number in NUMBERS and name]


def singular(name: str) -> str:
    """Singular of an English noun, of the last word of several."""
    first, _, last = name.rpartition(" ")
    if last in IRREGULAR:
        last = IRREGULAR[last]
    elif last not in SAME:
        for ending, here in (("ies", "y"), ("ches", "ch"), ("shes", "sh"), ("sses", "ss"), ("xes", "x"), ("oes", "o"),
                             ("s", "")):
            if last.endswith(ending) and not (ending == "ies" and len(last) < 5):
                last = last.removesuffix(ending) + here
                break
    return f"{first} {last}".strip()
