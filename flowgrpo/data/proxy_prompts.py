"""Prompts of proxy tasks, made from captions and from scored completions: `exact_match` is their reward.

A caption with one error (ViCrit): the model names the wrong words. A critique (Critique-Coder): the model says whether
a solution is right. An inverted question (TW-GRPO): the model names all choices that are wrong.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace

from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.nouns import counted

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


def inverted(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts with choices, each followed by its inversion, whose answer is all other choices (TW-GRPO).

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
        raise UserError(f"none of {counted(len(prompts), 'prompt')} has metadata.choices, a list such as [A, B, "
                        "C, D]")
    return made


def corrupted(caption: str, rng: random.Random) -> tuple[str, str, str] | None:
    """Return a caption with one expression exchanged, the wrong expression, and the right one; None if it has none that
    can be exchanged. The wrong one stands in it once."""
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
    """Return a prompt to find the error for each prompt whose metadata has a `caption` that can hold one.

    The wrong expression is metadata.answer, the right one metadata.right; pictures stay. The same seed makes the same
    errors. Raises UserError if no prompt yields one.
    """
    made = []
    for prompt in prompts:
        caption = prompt.metadata.get("caption")
        changed = corrupted(caption, random.Random(f"{seed}/{caption}")) if isinstance(caption, str) else None
        if changed is not None:
            text, wrong, right = changed
            made.append(replace(prompt, text=FIND.format(caption=text), metadata=prompt.metadata | {
                "task": "caption_error", "answer": wrong, "right": right}))
    if not made:
        raise UserError(f"none of {counted(len(prompts), 'prompt')} has a caption in which a word can be "
                        "exchanged: expected "
                        "metadata.caption, a text with a colour, a number, a place or the like")
    return made


def critiques(prompts: Sequence[Prompt], share: float = 0.2, seed: int = 0) -> list[Prompt]:
    """Return prompts, and critiques of their solutions as a share of all of them.

    A prompt's metadata has `solutions`, a list of {"text": ..., "right": true}. As many critiques of right solutions as
    of wrong ones are drawn, as far as there are. Raises UserError if there are too few for the share.
    """
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
