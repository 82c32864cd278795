"""Reference that is the present policy under richer prompts: a self-teacher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from flowgrpo.config.sections import Train
from flowgrpo.data.prompts import Prompt, answer_of
from flowgrpo.methods.method import Method
from flowgrpo.objectives.references import SelfTeacher, Teachers
from flowgrpo.policies.policy import Policy
from flowgrpo.rollouts.base import Encoded, GroupSampler
from flowgrpo.samplers.rollout import Part
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.kl_reference import KLReference
from flowgrpo.training.teachers import TeachersReference
from flowgrpo.types import Completions, Scored

if TYPE_CHECKING:
    from flowgrpo.text.policies.causal_lm import CausalLM


class SelfTeacherReference(KLReference):
    """An image has one teacher prompt, a text one per completion.

    prompts: of this process's groups, as they are learned.
    """

    def start_epoch(self, drawn: Epoch, rollouts: GroupSampler[Any], epoch: int, epochs: int) -> None:
        super().start_epoch(drawn, rollouts, epoch, epochs)
        self.teacher = cast(SelfTeacher, self.method.loss.reference)
        self.prompts: list[Prompt] = [prompt.learned for prompt in drawn.own]
        self.epoch, self.richer = epoch, cast("Encoded | None", None)

    def end(self, epoch: int, measured: float | None) -> dict[str, float]:
        self.richer = None
        return super().end(epoch, measured)

    def of_pictures(self) -> Encoded:
        """Return the encoded richer prompts, made at their first use."""
        if self.richer is None:
            texts = self.teacher.prompts([p.shown for p in self.prompts], [""] * len(self.prompts),
                                         [0.0] * len(self.prompts), [answer_of(p) for p in self.prompts])
            richer: Any = self.rollouts.conditioning(
                [replace(p.unguided, text=text) for p, text in zip(self.prompts, texts)], self.epoch)
            self.richer = replace(richer, sizes=self.conditioning.sizes)  # of the samples: a size goes by the prompt
        return self.richer

    def replay(self, part: Part) -> Iterator[tuple[int, slice, Scored]]:
        """Score a part's decisions under the teacher's prompts and the present weights."""
        rollouts = self.rollouts
        if not self.method.for_tokens:
            return rollouts.replay(part, self.of_pictures())
        [taken] = part.transitions
        assert isinstance(taken, Completions)
        alone = replace(taken, prompts=torch.arange(len(taken.ids)))
        prompts = self.of_texts(taken, part.rewards[0].tolist())
        policy = cast("CausalLM", rollouts.policy)
        of = policy.encode([prompt.text for prompt in prompts], images=[prompt.brings for prompt in prompts])
        return rollouts.replay(replace(part, transitions=(alone,)), of)

    def of_texts(self, taken: Completions, rewards: list[float]) -> list[Prompt]:
        """Return the teacher's prompt of each completion, as its group and their rewards make it."""
        written = [str(text) for text in cast("CausalLM", self.policy).written(taken.ids, taken.old.mask)]
        prompts = [self.prompts[place] for place in taken.prompts.tolist()]
        for place in taken.prompts.unique():
            rows = (taken.prompts == place).nonzero()[:, 0].tolist()
            texts = self.teacher.prompts([prompts[row].shown for row in rows], [written[row] for row in rows],
                                         [rewards[row] for row in rows], [answer_of(prompts[row]) for row in rows])
            for row, text in zip(rows, texts):
                prompts[row] = replace(prompts[row].unguided, text=text)
        return prompts


def make_reference(train: Train, method: Method, policy: Policy, memory: dict[str, Any]) -> KLReference:
    """Return the reference of a method. memory: of its parts."""
    kinds: dict[type, type[KLReference]] = {SelfTeacher: SelfTeacherReference, Teachers: TeachersReference}
    return kinds.get(type(method.loss.reference), KLReference)(train, method, policy, memory)
