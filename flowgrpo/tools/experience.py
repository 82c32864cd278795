"""Learning without updates (Training-Free GRPO, 2510.08191): a library of experience in the prompt, edited by a
language model that compares the samples of a group: `flowgrpo contrib lessons`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowgrpo.rewards.vlm_judge.parse import conclusion, objects

Sampled = tuple[list[list[str]], list[list[float]]]  # of each prompt, the texts of its group and their rewards
SHOWN = 2000  # characters of a completion that the language model compares
ASK = """Several answers to one request were scored; a higher reward is better. Find what the better answers did that \
the worse ones did not, in a way that helps with other requests too, and edit the library of experience by it.
Request: {prompt}
{answers}
Library:
{library}
Answer with JSON alone, at most {most} edits: [{{"add": "a lesson of one sentence"}}, {{"change": 2, "to": "a better \
wording"}}, {{"delete": 1}}]; [] if nothing is to be learned."""


@dataclass
class Library:
    """Lessons, at most `longest` of them; the oldest leaves first."""

    entries: list[str] = field(default_factory=list)
    longest: int = 32

    def text(self) -> str:
        """Numbered lessons; empty without any."""
        return "\n".join(f"{number}. {entry}" for number, entry in enumerate(self.entries, 1))

    def before(self, prompt: str) -> str:
        """Prompt behind the lessons."""
        return f"Lessons from earlier tasks:\n{self.text()}\n\n{prompt}" if self.entries else prompt

    def edit(self, answer: str, most: int) -> int:
        """Apply an answer's first valid edits, and return their number. Numbers are those before the edits."""
        entries: dict[int, str] = dict(enumerate(self.entries, 1))
        added: list[str] = []
        done = 0
        for edit in objects(conclusion(answer)):
            if done == most:
                break
            lesson, place = edit.get("add", edit.get("to")), edit.get("change", edit.get("delete"))
            lesson = " ".join(lesson.split()) if isinstance(lesson, str) else ""
            if "add" in edit and lesson and lesson not in [*entries.values(), *added]:
                added.append(lesson)
            elif "change" in edit and lesson and place in entries:
                entries[place] = lesson
            elif "delete" in edit and place in entries:
                del entries[place]
            else:
                continue
            done += 1
        self.entries = [*entries.values(), *added][-self.longest:]
        return done


def request(prompt: str, texts: Sequence[str], rewards: Sequence[float], library: Library, most: int) -> str:
    """Question that compares a group: its texts from the best to the worst, and the library."""
    ranked = sorted(zip(rewards, texts), key=lambda pair: -pair[0])
    answers = "\n".join(f"Answer with reward {reward:g}:\n{text[:SHOWN]}\n" for reward, text in ranked)
    return ASK.format(prompt=prompt, answers=answers, library=library.text() or "(empty)", most=most)


def learn(library: Library, batches: Callable[[int], Sequence[str]], sample: Callable[[Sequence[str], int], Sampled],
          ask: Callable[[str], str], epochs: int, most: int, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Edit a library in place, and return a line per epoch.

    batches: the prompts of an epoch. sample: their groups in an epoch, of prompts behind the library. ask: the language
    model. most: edits by one group. A group whose rewards are equal teaches nothing, and is not compared.
    """
    lines = []
    for epoch in range(epochs):
        prompts, compared, edits = batches(epoch), 0, 0
        groups, rewards = sample([library.before(prompt) for prompt in prompts], epoch)
        for prompt, texts, scores in zip(prompts, groups, rewards):
            known = [(score, text) for score, text in zip(scores, texts) if score == score]
            if len({score for score, _ in known}) < 2:
                continue
            compared += 1
            question = request(prompt, [text for _, text in known], [score for score, _ in known], library, most)
            edits += library.edit(ask(question), most)
        every = [score for scores in rewards for score in scores if score == score]
        lines.append({"epoch": epoch, "reward": sum(every) / max(len(every), 1), "compared": compared, "edits": edits,
                      "lessons": len(library.entries)})
        log(json.dumps(lines[-1]))
    return lines
