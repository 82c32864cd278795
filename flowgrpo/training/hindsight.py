"""Prompts of a self-teacher: the additional text for each sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch

from flowgrpo.data.prompts import Prompt
from flowgrpo.objectives.references import SelfTeacher
from flowgrpo.rollouts.base import Encoded, GroupSampler
from flowgrpo.samplers.rollout import Part
from flowgrpo.samplers.text.answers import answer_of
from flowgrpo.types import Completions, Scored


class Hindsight:
    """Replays of a policy under the prompts of its self-teacher.

    turns: this process's prompts of each turn of the epoch. Pictures have one richer prompt each, texts one per
    completion.
    """

    def __init__(self, teacher: SelfTeacher, rollouts: GroupSampler[Any]):
        self.teacher, self.rollouts = teacher, rollouts
        self.turns: dict[int, list[Prompt]] = {}
        self.epoch, self.richer = 0, cast("Encoded | None", None)

    def begin(self, batch: list[Prompt], epoch: int, turn: int = 0) -> None:
        """Take the prompts of a turn; the first one begins the epoch."""
        self.turns = {turn: batch} if turn == 0 else self.turns | {turn: batch}
        self.epoch, self.richer = epoch, None

    @property
    def prompts(self) -> list[Prompt]:
        """Return the epoch's prompts as they are learned, turn by turn."""
        return [prompt.learned for turn in sorted(self.turns) for prompt in self.turns[turn]]

    def of_pictures(self) -> Encoded:
        """Return the encoded richer prompts, made at their first use."""
        if self.richer is None:
            prompts = self.prompts
            texts = self.teacher.prompts([p.shown for p in prompts], [""] * len(prompts), [0.0] * len(prompts),
                                         [answer_of(p) for p in prompts])
            self.richer = self.rollouts.conditioning(
                [replace(p.unguided, text=text) for p, text in zip(prompts, texts)], self.epoch)
        return self.richer

    def replay(self, part: Part) -> Iterator[tuple[int, slice, Scored]]:
        """Score a part's decisions under the teacher's prompts and the present weights."""
        if not self.rollouts.method.for_tokens:
            return self.rollouts.replay(part, self.of_pictures())
        [taken] = part.transitions
        assert isinstance(taken, Completions)
        alone = replace(taken, prompts=torch.arange(len(taken.ids)))
        policy: Any = self.rollouts.policy
        prompts = self.of_texts(taken, part.rewards[0].tolist())
        of = policy.encode([prompt.text for prompt in prompts], images=[prompt.brings for prompt in prompts])
        return self.rollouts.replay(replace(part, transitions=(alone,)), of)

    def of_texts(self, taken: Completions, rewards: list[float]) -> list[Prompt]:
        """Return the teacher's prompt of each completion, as its group and their rewards make it."""
        policy: Any = self.rollouts.policy
        written = [str(text) for text in policy.written(taken.ids, taken.old.mask)]
        every = self.prompts
        prompts = [every[place] for place in taken.prompts.tolist()]
        for place in taken.prompts.unique():
            rows = (taken.prompts == place).nonzero()[:, 0].tolist()
            texts = self.teacher.prompts([prompts[row].shown for row in rows], [written[row] for row in rows],
                                         [rewards[row] for row in rows], [answer_of(prompts[row]) for row in rows])
            for row, text in zip(rows, texts):
                prompts[row] = replace(prompts[row].unguided, text=text)
        return prompts


def make_hindsight(rollouts: GroupSampler[Any]) -> Hindsight | None:
    """Return the replays of a method's self-teacher; None if its reference is another."""
    reference = rollouts.method.loss.reference
    return Hindsight(reference, rollouts) if isinstance(reference, SelfTeacher) else None
