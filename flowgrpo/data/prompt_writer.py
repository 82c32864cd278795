"""Prompts from templates with slots, and from the lines of a language model's answer."""

from __future__ import annotations

import math
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

BULLET = re.compile(r"^\s*(?:[-*•]|\(?\d+[.):])\s+")


@dataclass(frozen=True)
class Templates:
    """Templates such as "a photo of {count} {animal}" with the words of their slots.

    slots: by slot its words with the value that the metadata gets. metadata: of every prompt.
    """

    templates: tuple[str, ...]
    slots: Mapping[str, Mapping[str, Any]]
    metadata: Mapping[str, Any]

    def write(self, count: int, seed: int) -> list[Prompt]:
        """Return at most `count` different prompts, drawn evenly over the templates."""
        rng = np.random.default_rng(seed)
        drawn = [self._filled(template, rng) for template in self.templates]
        prompts: dict[str, Prompt] = {}
        while drawn and len(prompts) < count:
            for filled in list(drawn):
                prompt = next((prompt for prompt in filled if prompt.text not in prompts), None)
                if prompt is None:
                    drawn.remove(filled)
                elif len(prompts) < count:
                    prompts[prompt.text] = prompt
        return list(prompts.values())

    def _filled(self, template: str, rng: np.random.Generator) -> Iterator[Prompt]:
        """Yield all prompts of a template in a random order: a walk through its combinations by a coprime stride."""
        names = slots_of(template)
        sizes = [len(self.slots[name]) for name in names]
        whole = math.prod(sizes)
        start, stride = _drawn(rng, whole), 1 + _drawn(rng, whole)
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


def _drawn(rng: np.random.Generator, below: int) -> int:
    """Return a number from 0 to below - 1, which may have any number of digits."""
    if below < 2**63:
        return int(rng.integers(below))
    return int.from_bytes(rng.bytes(below.bit_length() // 8 + 8), "big") % below


def slots_of(template: str) -> list[str]:
    """Return the names of a template's slots, each once."""
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
    slots = {name: _words(path, name, words) for name, words in (given.get("slots") or {}).items()}
    for template in given["templates"]:
        _require_slots(path, template, slots)
    return Templates(tuple(given["templates"]), slots, given.get("metadata") or {})


def _words(path: Path, name: str, words: Any) -> dict[str, Any]:
    """Return a slot's words with their values: a list's words stand for themselves."""
    if not isinstance(words, (list, dict)) or not words:
        raise UserError(f"{path}: slots.{name}: got {words!r}, expected a list of words, or words with values")
    return {str(word): words[word] if isinstance(words, dict) else word for word in words}


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
    """Return the prompts of a language model's answer: its lines, without numbers, bullets and quotes around."""
    lines = (BULLET.sub("", line).strip().strip('"') for line in text.splitlines())
    return [line for line in lines if line and not line.endswith(":")]


def request(about: str, count: int, known: Sequence[str]) -> list[dict[str, Any]]:
    """Return the messages that ask a language model for prompts; known: some that it is not to repeat."""
    text = (f"Write {count} prompts for a text-to-image model about: {about}. Vary subjects, wording and length. One "
            "prompt per line, without numbers, quotes or comments.")
    if known:
        text += " Do not repeat any of these:\n" + "\n".join(known)
    return [{"role": "user", "content": text}]


def variant_request(prompt: str, count: int) -> list[dict[str, Any]]:
    """Return the messages that ask a language model for variants of a prompt with the same answer (variational problem
    synthesis, SvS)."""
    text = (f"Rewrite the following {count} times. Keep every fact that its answer or a check of the result depends "
            "on: numbers, names, colours, relations, and what is asked. Change wording, order and setting. One version "
            f"per line, without numbers, quotes or comments.\n\n{prompt}")
    return [{"role": "user", "content": text}]


def variants(prompts: Sequence[Prompt], count: int, ask: Callable[[list[dict[str, Any]]], str]) -> list[Prompt]:
    """Return up to `count` variants of every prompt, with its metadata: the reference answer or check stays.

    ask: from messages to a language model's answer. A variant that repeats its prompt, or another one, is left out.
    """
    known, written = {prompt.text for prompt in prompts}, []
    for prompt in prompts:
        for text in of_answer(ask(variant_request(prompt.text, count)))[:count]:
            if text not in known:
                known.add(text)
                written.append(replace(prompt, text=text))
    return written
