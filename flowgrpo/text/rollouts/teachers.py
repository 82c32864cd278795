"""Answers of teachers, for the groups that fail."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flowgrpo.curriculum.resampling import failing
from flowgrpo.data.prompts import Guidance, Prompt
from flowgrpo.parts import part

if TYPE_CHECKING:
    from flowgrpo.curriculum.epoch_batch import EpochBatch


@part("redraw", target="texts", puts_answers=True)
class TeacherAnswers:
    """Sample a group without a sample above `fail` anew, with teachers' answers as last samples (AMPO, 2510.02227).

    The metadata holds the teachers' answers under `solutions`, a list of texts or of {"text": ..., "right": true}, and
    the right answer under `answer`. Up to `decoding.expert` of them join the group: those whose reasoning, the text
    before the right answer, makes that answer likeliest for the policy. All other groups have samples alone.

    AMPO keeps the samples of the group that failed; here they are drawn anew.
    """

    fail: float = 0.0

    def __call__(self, drawn: EpochBatch) -> list[tuple[int, Prompt]]:
        failed = failing(drawn, self.fail)
        prompts = [(place, drawn.prompts[place]) for place in drawn.standing() if failed[place]]
        return [(place, replace(prompt, guided=Guidance(prompt.text, answers=True))) for place, prompt in prompts
                if solutions_of(prompt) and not prompt.guided]


def solutions_of(prompt: Prompt) -> list[str]:
    """The teachers' right answers in a prompt's metadata, in order."""
    listed = prompt.metadata.get("solutions") or ()
    entries = [entry if isinstance(entry, dict) else {"text": entry} for entry in listed]
    return [str(entry["text"]) for entry in entries if entry.get("text") and entry.get("right", True)]
