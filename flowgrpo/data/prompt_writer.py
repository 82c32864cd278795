"""New prompts: from templates with slots, from the lines of a language model's answer, and of proxy tasks, made from
captions and from scored completions, with `exact_match` as their reward.
"""

import math
import random
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo.config import yaml_text
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError, nearest
from flowgrpo.nouns import quantity

BULLET = re.compile(r"^\s*(?:[-*•]|\(?\d+[.):])\s+")
# Words of which one stands for another; the longest forms first where one begins with another.
SWAPS = (
    ("red", "blue", "green", "yellow", "orange", "purple", "pink", "brown", "black", "white", "grey"),
    ("one", "two", "three", "four", "five", "six", "seven"),
    ("left", "right"), ("above", "below"), ("in front of", "behind"), ("inside", "outside"),
    ("large", "small"), ("tall", "short"), ("open", "closed"), ("empty", "full"), ("wooden", "metal", "plastic"),
    ("man", "woman", "child"), ("boy", "girl"), ("dog", "cat", "horse", "bird"), ("car", "bus", "truck", "bicycle"),
    ("standing", "sitting", "lying"), ("holding", "dropping"), ("circle", "square", "triangle", "star"))
_OTHERS = {word: [other for other in words if other != word] for words in SWAPS for word in words}
_WORD = re.compile(rf"\b({'|'.join(sorted(map(re.escape, _OTHERS), key=len, reverse=True))})\b", re.I)
FIND = ("One expression of this caption of the picture is wrong. Name it exactly as it stands in the caption, in "
        "<answer> tags.\nCaption: {caption}")
JUDGE = ("Below are a question and a solution. Say whether the solution is right: end with <answer>right</answer> or "
         "<answer>wrong</answer>.\nQuestion: {question}\nSolution: {solution}")
INVERT = "{question}\nName the choices that do NOT answer this question, all of them, in <answer> tags, such as A, C."


@dataclass(frozen=True)
class Templates:
    """Templates such as "a photo of {count} {animal}" with the words of their slots.

    slots: by slot its words with the value that the metadata gets. metadata: of every prompt.
    """

    templates: tuple[str, ...]
    slots: Mapping[str, Mapping[str, Any]]
    metadata: Mapping[str, Any]

    def write(self, count: int, seed: int) -> list[Prompt]:
        """At most `count` different prompts, drawn evenly over the templates."""
        rng = np.random.default_rng(seed)
        drawn = [self._fill(template, rng) for template in self.templates]
        prompts: dict[str, Prompt] = {}
        while drawn and len(prompts) < count:
            for filled in list(drawn):
                prompt = next((prompt for prompt in filled if prompt.text not in prompts), None)
                if prompt is None:
                    drawn.remove(filled)
                elif len(prompts) < count:
                    prompts[prompt.text] = prompt
        return list(prompts.values())

    def _fill(self, template: str, rng: np.random.Generator) -> Iterator[Prompt]:
        """Yield all prompts of a template in a random order: a walk through its combinations by a coprime stride."""
        names = slots_of(template)
        sizes = [len(self.slots[name]) for name in names]
        whole = math.prod(sizes)
        start, stride = _random_below(rng, whole), 1 + _random_below(rng, whole)
        while math.gcd(stride, whole) > 1:
            stride += 1
        for step in range(whole):
            place = (start + step * stride) % whole
            words = {}
            for name, size in zip(names, sizes):
                place, index = divmod(place, size)
                words[name] = list(self.slots[name])[index]
            facts = {name: self.slots[name][word] for name, word in words.items()}
            yield Prompt(template.format(**words), metadata={**self.metadata, **facts})


def _random_below(rng: np.random.Generator, below: int) -> int:
    if below < 2**63:
        return int(rng.integers(below))
    return int.from_bytes(rng.bytes(below.bit_length() // 8 + 8), "big") % below


def slots_of(template: str) -> list[str]:
    return list(dict.fromkeys(name for _, name, _, _ in string.Formatter().parse(template) if name is not None))


def load_templates(path: Path) -> Templates:
    """Read a YAML file with `templates`, `slots` and maybe `metadata`. Raises UserError with the key of a mistake."""
    given = yaml_text.read(path)
    if not isinstance(given, dict) or not isinstance(given.get("templates"), list) or not given["templates"]:
        raise UserError(f"{path}: expected a list under 'templates', such as [\"a photo of {{animal}}\"]")
    for key in given:
        if key not in ("templates", "slots", "metadata"):
            raise UserError(f"{path}: unknown key {key!r}{nearest(str(key), ['templates', 'slots', 'metadata'])}")
    for key in ("slots", "metadata"):
        if not isinstance(given.get(key) or {}, dict):
            raise UserError(f"{path}: {key}: got {given[key]!r}, expected names with values")
    slots: dict[str, dict[str, Any]] = {}
    for name, words in (given.get("slots") or {}).items():
        if not isinstance(words, (list, dict)) or not words:
            raise UserError(f"{path}: slots.{name}: got {words!r}, expected a list of words, or words with values")
        slots[name] = {str(word): words[word] if isinstance(words, dict) else word for word in words}
    for template in given["templates"]:
        _require_slots(path, template, slots)
    return Templates(tuple(given["templates"]), slots, given.get("metadata") or {})


def _require_slots(path: Path, template: Any, slots: Mapping[str, Any]) -> None:
    try:
        names = slots_of(template)
        if any(form or conversion for _, _, form, conversion in string.Formatter().parse(template)):
            raise ValueError("a slot has a format")  # which could ask for a text of any length
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: the template {template!r} is not one ({error})") from None
    for name in names:
        if name not in slots:
            raise UserError(f"{path}: the template {template!r} has the slot {name!r}{nearest(name, list(slots))}, "
                            f"which 'slots' does not have")


def of_answer(text: str) -> list[str]:
    """Prompts of a language model's answer: its lines, without numbers, bullets and quotes around."""
    lines = (BULLET.sub("", line).strip().strip('"') for line in text.splitlines())
    return [line for line in lines if line and not line.endswith(":")]


def request(about: str, count: int, known: Sequence[str]) -> list[dict[str, Any]]:
    """Messages that ask a language model for prompts; known: some that it is not to repeat."""
    text = (f"Write {count} prompts for a text-to-image model about: {about}. Vary subjects, wording and length. One "
            "prompt per line, without numbers, quotes or comments.")
    if known:
        text += " Do not repeat any of these:\n" + "\n".join(known)
    return [{"role": "user", "content": text}]


def variants(prompts: Sequence[Prompt], count: int, ask: Callable[[list[dict[str, Any]]], str]) -> list[Prompt]:
    """Up to `count` variants of every prompt, with its metadata: reference answer or check stays (SvS)."""
    known, written = {prompt.text for prompt in prompts}, []
    for prompt in prompts:
        text = (f"Rewrite the following {count} times. Keep every fact that its answer or a check of the result "
                "depends on: numbers, names, colours, relations, and what is asked. Change wording, order and setting. "
                f"One version per line, without numbers, quotes or comments.\n\n{prompt.text}")
        for text in of_answer(ask([{"role": "user", "content": text}]))[:count]:
            if text not in known:
                known.add(text)
                written.append(replace(prompt, text=text))
    return written


def with_inversions(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts with choices, each followed by its inversion, whose answer is all other choices (TW-GRPO).

    The metadata have `choices`, the labels of the choices in the text, and `answer`, one of them or a list. Prompts
    that have none are left out. Raises UserError if none has them, and for an answer that is no choice.
    """
    made = []
    for prompt in prompts:
        choices, right = prompt.metadata.get("choices"), prompt.metadata.get("answer")
        right = right if isinstance(right, list) else [right]
        if not isinstance(choices, list):
            continue
        if not set(map(str, right)) <= set(map(str, choices)):
            raise UserError(f"metadata.answer of the prompt {prompt.text[:60]!r} is {right}, expected of {choices}")
        others = [choice for choice in choices if str(choice) not in set(map(str, right))]
        made.append(replace(prompt, metadata=prompt.metadata | {"answer": right}))
        if others:
            made.append(replace(prompt, text=INVERT.format(question=prompt.text), metadata=prompt.metadata | {
                "task": "inversion", "answer": others}))
    if not made:
        raise UserError(f"none of {quantity(len(prompts), 'prompt')} has metadata.choices, a list such as [A, B, "
                        "C, D]")
    return made


def corrupt(caption: str, rng: random.Random) -> tuple[str, str, str] | None:
    """Caption with one expression exchanged, the wrong expression, and the right one; None if it has none that can be
    exchanged. The wrong one stands in it once."""
    places = list(_WORD.finditer(caption))
    rng.shuffle(places)
    for place in places:
        others = [other for other in _OTHERS[place[0].lower()]
                  if not re.search(rf"\b{re.escape(other)}\b", caption, re.I)]
        if others:
            wrong = rng.choice(others)
            wrong = wrong[0].upper() + wrong[1:] if place[0][0].isupper() else wrong
            return caption[:place.start()] + wrong + caption[place.end():], wrong, place[0]
    return None


def caption_errors(prompts: Sequence[Prompt], seed: int = 0) -> list[Prompt]:
    """Prompt to find the error for each prompt whose metadata has a `caption` that can hold one; its answer is the
    wrong expression, metadata.right the right one. Images stay. The same seed makes the same errors.
    Raises UserError if no prompt yields one."""
    made = []
    for prompt in prompts:
        caption = prompt.metadata.get("caption")
        changed = corrupt(caption, random.Random(f"{seed}/{caption}")) if isinstance(caption, str) else None
        if changed is not None:
            text, wrong, right = changed
            made.append(replace(prompt, text=FIND.format(caption=text), metadata=prompt.metadata | {
                "task": "caption_error", "answer": wrong, "right": right}))
    if not made:
        raise UserError(f"none of {quantity(len(prompts), 'prompt')} has a caption in which a word can be exchanged: "
                        "expected metadata.caption, a text with a colour, a number, a place or the like")
    return made


def critiques(prompts: Sequence[Prompt], share: float = 0.2, seed: int = 0) -> list[Prompt]:
    """Prompts, and critiques of their solutions as a share of all of them; as many of right solutions as of wrong
    ones, as far as there are. A prompt's metadata has `solutions`, a list of {"text": ..., "right": true}.
    Raises UserError if there are too few for the share."""
    if not 0 < share < 1:
        raise UserError(f"share is {share}, expected above 0 and below 1")
    drawn: dict[bool, list[Prompt]] = {True: [], False: []}
    for prompt in prompts:
        for solution in prompt.metadata.get("solutions", ()):
            if not isinstance(solution, dict) or not isinstance(solution.get("text"), str) \
                    or type(solution.get("right")) is not bool:
                raise UserError(f"metadata.solutions of the prompt {prompt.text[:60]!r} has {str(solution)[:60]!r}, "
                                'expected {"text": ..., "right": true or false}')
            drawn[solution["right"]].append(replace(
                prompt, text=JUDGE.format(question=prompt.text, solution=solution["text"]),
                metadata={"task": "critique", "answer": "right" if solution["right"] else "wrong"}))
    rng, count = random.Random(seed), round(len(prompts) * share / (1 - share))
    for each in drawn.values():
        rng.shuffle(each)
    some = [prompt for pair in zip(drawn[True], drawn[False]) for prompt in pair]
    left = drawn[True][len(some) // 2:] + drawn[False][len(some) // 2:]
    if len(some) + len(left) < count:
        raise UserError(f"{len(some) + len(left)} solutions for {count} critiques, {share:g} of all prompts: expected "
                        "more metadata.solutions, or a smaller share")
    plain = [replace(prompt, metadata={key: value for key, value in prompt.metadata.items() if key != "solutions"})
             for prompt in prompts]
    return plain + (some + left)[:count]
