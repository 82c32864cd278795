"""KL reference policy of a run and the KL weight of each epoch. Some surrogates read its scores too. A reference may be
another model for each source of prompts (teachers), or the present policy under richer prompts (a self-teacher).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from flowgrpo.config.sections import Train
from flowgrpo.data.prompts import Prompt, answer_of
from flowgrpo.distributed.processes import Processes
from flowgrpo.methods.method import Method
from flowgrpo.objectives.kl import at_epoch, is_active
from flowgrpo.objectives.references import SelfTeacher, Soup, Teachers
from flowgrpo.policies.policy import Policy
from flowgrpo.rollouts.base import Encoded, GroupSampler
from flowgrpo.samplers.growth import calls, rescore
from flowgrpo.samplers.rollout import Part
from flowgrpo.storage import checkpoint
from flowgrpo.training.epoch import Epoch
from flowgrpo.types import Completions, RunState, Scored

Snapshot = dict[str, torch.Tensor]
Replay = Callable[[Part], Iterator[tuple[int, slice, Scored]]]


class KLReference:
    """KL of a method with its reference: the base model, snapshots of the trained weights (`snapshots`), or a teacher.

    memory: of the method; it holds the last epoch's KL under "kl".
    keep: an epoch has several passes, in which the reference's scores are reused.
    teacher: the other model that takes the policy's place; empty for none.
    swaps: its weights take the place of the policy's for a whole part.
    """

    swaps: ClassVar[bool] = True

    def __init__(self, train: Train, method: Method, policy: Policy, memory: dict[str, Any]):
        self.method = method
        self.policy = policy
        self.memory = memory
        self.keep = train.inner_epochs > 1
        self.teacher: str = getattr(method.loss.reference, "model", "")
        self.rollouts: GroupSampler[Any]
        self.conditioning: Any = None
        self.kl = self.method.loss.kl
        self.active = is_active(self.kl)  # in some epoch
        if not self.active:
            self.kl = at_epoch(self.kl, RunState(epochs=train.epochs, memory=memory))
        self.snapshots: list[Snapshot] = self.next([], 0)
        self.cached: dict[int, list[Scored]] = {}
        self.likelihood: torch.Tensor | None = None  # of the epoch's samples under the reference

    def start_epoch(self, drawn: Epoch, rollouts: GroupSampler[Any], epoch: int, epochs: int) -> None:
        """Set the KL's weight for an epoch, and drop the last one's scores.
        drawn: the epoch's samples; rollouts: replay them."""
        if self.active:
            self.kl = at_epoch(self.method.loss.kl, RunState(epoch, epochs, self.memory))
        self.cached = {}
        self.rollouts, self.conditioning = rollouts, drawn.conditioning

    def replay(self, part: Part) -> Iterator[tuple[int, slice, Scored]]:
        """Score a part's decisions as the reference is given them."""
        return self.rollouts.replay(part, conditioning=self.conditioning)

    @property
    def is_read(self) -> bool:
        return bool(self.kl.weight) or self.method.loss.surrogate.reads_reference

    def score_samples(self, parts: list[Part], replay: Replay, processes: Processes) -> None:
        """Set the likelihood [P,G] of the samples of all processes, if the shaping of rewards reads it."""
        if not self.method.judges_by_reference:
            return
        shaping: Any = self.method.credit.shaping
        with self._in_place():
            leaves = [shaping.likelihood(part.transitions[0], torch.cat([score.logp for _, _, score in replay(part)]))
                      for part in parts]
        group = len(parts[0].prompts) // len(parts[0].groups)
        self.likelihood = processes.gather(torch.cat(leaves).cpu()).view(-1, group)

    def score_all(self, parts: list[Part], processes: Processes) -> None:
        """Score all parts of an epoch at once if the reference's weights are large, which take long to put in place, or
        sharded, where all processes have the reference in place until the last one is done with it."""
        weights = self.policy.weights
        if self.is_read and (weights.large or weights.sharded) and self.swaps and not self.teacher:
            with self.policy.reference(self.snapshots), processes.collective():
                self.cached = {}
                for part in processes.in_step(parts, self.calls_of):
                    self.cached[id(part)] = [score.to(self.policy.states) for _, _, score in self.replay(part)]

    def calls_of(self, parts: Sequence[Part], processes: Processes) -> list[Any]:
        """Keys of parts; processes whose keys are equal call the denoiser alike, in updates and in scoring.
        Prompts with guidance scales of their own have the rank in their key, which no other process shares."""
        scales = getattr(self.conditioning, "scales", None)
        return [(processes.rank if scales else None, id(part) in self.cached, calls(part)) for part in parts]

    def scores(self, part: Part) -> list[Scored]:
        """The reference's scores of a part's transitions, if this epoch's KL or the surrogate needs them."""
        if not self.is_read:
            return []
        if id(part) in self.cached:
            return self.cached[id(part)]
        scores = self._score(part)
        if self.keep:
            self.cached[id(part)] = scores
        return scores

    def _score(self, part: Part) -> list[Scored]:
        with self._in_place():
            return [self._put_away(score) for _, _, score in self.replay(part)]

    def _put_away(self, score: Scored) -> Scored:
        return score.to(self.policy.states) if self.keep else score

    @torch.no_grad()
    def leaves(self, part: Part, replay: Replay) -> torch.Tensor:
        """The reference's mean log-probability of each leaf of a part: float64 [b]."""
        with self._in_place():
            return rescore(part, replay(part)).leaves()["logp"]

    def penalty(self, new: Scored, reference: Scored, rewards: torch.Tensor) -> torch.Tensor:
        """The KL [b,N] of scored decisions, 0 for samples of a reward that the reference leaves out.
        rewards: [b], the total rewards."""
        penalty = self.kl(new, reference.to(self.policy.device))
        below = getattr(self.method.loss.reference, "only_below", None)
        return penalty if below is None else penalty * (rewards < below)[:, None].to(penalty)

    def _in_place(self) -> AbstractContextManager[None]:
        return cast(Any, self.policy).teacher(self.teacher) if self.teacher else self.policy.reference(self.snapshots)

    def end(self, epoch: int, measured: float | None) -> dict[str, float]:
        """Store the mean KL after an epoch's last update, if it was `measured`, and set up the next reference.
        Returns the KL's metrics."""
        self.cached, self.conditioning = {}, None  # freed before the next rollout
        self.snapshots = self.next(self.snapshots, epoch + 1)
        if not self.active:
            return {}
        self.memory["kl"] = {"weight": self.kl.weight, "measured": measured}
        return {"kl_weight": self.kl.weight}

    def state(self) -> tuple[Snapshot, dict[str, Any]]:
        """The snapshots, numbered, for a checkpoint."""
        return checkpoint.joined(dict(enumerate(self.snapshots))), {}

    def load_state(self, tensors: Snapshot, values: dict[str, Any]) -> None:
        """Restore the snapshots of a checkpoint; a reference that keeps some takes the present weights without them."""
        numbers = dict.fromkeys(name.partition("/")[0] for name in tensors)
        if self.snapshots:
            self.snapshots = [checkpoint.within(tensors, f"{number}/") for number in numbers] or \
                self.next([], values["epoch"])

    def next(self, held: list[Snapshot], epoch: int) -> list[Snapshot]:
        """The snapshots of an epoch's reference, from those held before and the weights it starts with."""
        if not self.active and not self.method.compares_with_reference:
            return []
        soup = self.method.loss.reference
        if isinstance(soup, Soup) and soup.models and not held:
            return [self.policy.weights.soup(soup.models, soup.shares)]
        return self.method.loss.reference(held, self.policy.weights.snapshot, epoch)


class TeachersReference(KLReference):
    """Each prompt has the teacher of its source; a part with prompts of several is scored once by each.

    snapshots: of the teachers, in their order. of: int64 [P], the teacher of each of this process's groups.
    """

    swaps = False  # a part is scored when it is trained

    def start_epoch(self, drawn: Epoch, rollouts: GroupSampler[Any], epoch: int, epochs: int) -> None:
        super().start_epoch(drawn, rollouts, epoch, epochs)
        place = cast(Teachers, self.method.loss.reference).place
        self.of = torch.tensor([place(prompt.metadata) for prompt in drawn.own], dtype=torch.int64)

    def next(self, held: list[Snapshot], epoch: int) -> list[Snapshot]:
        if not self.active:
            return []
        models = cast(Teachers, self.method.loss.reference).models
        return held or [self.policy.weights.soup([path], ()) for _, path in models]

    def _score(self, part: Part) -> list[Scored]:
        """The scores of a part's transitions by the teachers of their prompts."""
        found: list[Scored] = []
        for number in self.of[part.prompts.cpu()].unique().tolist():
            with self.policy.reference(self.snapshots[number:number + 1]):
                replayed = [*self.replay(part)]
            own = [self.of[part.transitions[k].prompts[rows].cpu()] == number for k, rows, _ in replayed]
            scores = [score for _, _, score in replayed]
            found = [join_rows(*pair) for pair in zip(found, scores, own, strict=True)] if found else scores
        return [self._put_away(score) for score in found]


def join_rows(one: Scored, other: Scored, rows: Tensor) -> Scored:
    """A score with these rows, bool [b], of another one."""
    def select(first: Tensor | None, second: Tensor | None) -> Tensor | None:
        if first is None or second is None or len(first) != len(rows):
            return first  # of all rows alike
        return torch.where(rows.to(first.device).view(-1, *[1] * (first.ndim - 1)), second, first)

    fields: Any = {name: select(getattr(one, name), getattr(other, name)) for name in ("logp", "mean", "entropy")}
    std = one.std if one.std is None or one.std.ndim < 2 else select(one.std, other.std)
    return replace(one, **fields, std=std)


class SelfTeacherReference(KLReference):
    """An image has one teacher prompt, a text one per completion.

    prompts: of this process's groups, as they are learned.
    """

    swaps = False

    def start_epoch(self, drawn: Epoch, rollouts: GroupSampler[Any], epoch: int, epochs: int) -> None:
        super().start_epoch(drawn, rollouts, epoch, epochs)
        self.writer = cast(SelfTeacher, self.method.loss.reference)
        self.prompts: list[Prompt] = [prompt.learned for prompt in drawn.own]
        self.epoch, self.richer = epoch, cast("Encoded | None", None)

    def end(self, epoch: int, measured: float | None) -> dict[str, float]:
        self.richer = None
        return super().end(epoch, measured)

    def _in_place(self) -> AbstractContextManager[None]:
        return torch.no_grad()

    def of_images(self) -> Encoded:
        """The encoded richer prompts, made at their first use."""
        if self.richer is None:
            texts = self.writer.prompts([p.shown for p in self.prompts], [""] * len(self.prompts),
                                         [0.0] * len(self.prompts), [answer_of(p) for p in self.prompts])
            richer: Any = self.rollouts.conditioning(
                [replace(p.unguided, text=text) for p, text in zip(self.prompts, texts)], self.epoch)
            self.richer = replace(richer, sizes=self.conditioning.sizes)  # of the samples: a size goes by the prompt
        return self.richer

    def replay(self, part: Part) -> Iterator[tuple[int, slice, Scored]]:
        """Score a part's decisions under the teacher's prompts and the present weights."""
        rollouts = self.rollouts
        if not self.method.for_tokens:
            return rollouts.replay(part, self.of_images())
        [taken] = part.transitions
        assert isinstance(taken, Completions)
        alone = replace(taken, prompts=torch.arange(len(taken.ids)))
        prompts = self.of_texts(taken, part.rewards[0].tolist())
        policy = cast(Any, rollouts.policy)
        of = policy.encode([prompt.text for prompt in prompts], images=[prompt.brings for prompt in prompts])
        return rollouts.replay(replace(part, transitions=(alone,)), of)

    def of_texts(self, taken: Completions, rewards: list[float]) -> list[Prompt]:
        """The teacher's prompt of each completion, as its group and their rewards make it."""
        prompts = [self.prompts[place] for place in taken.prompts.tolist()]
        written = [str(text) for text in cast(Any, self.policy).detokenize(taken.ids, taken.old.mask,
                                                                           [prompt.shown for prompt in prompts])]
        for place in taken.prompts.unique():
            rows = (taken.prompts == place).nonzero()[:, 0].tolist()
            texts = self.writer.prompts([prompts[row].shown for row in rows], [written[row] for row in rows],
                                         [rewards[row] for row in rows], [answer_of(prompts[row]) for row in rows])
            for row, text in zip(rows, texts):
                prompts[row] = replace(prompts[row].unguided, text=text)
        return prompts


def make_reference(train: Train, method: Method, policy: Policy, memory: dict[str, Any]) -> KLReference:
    """A teacher's distribution where the method names one, else the base model's. memory: of its parts."""
    kinds: dict[type, type[KLReference]] = {SelfTeacher: SelfTeacherReference, Teachers: TeachersReference}
    return kinds.get(type(method.loss.reference), KLReference)(train, method, policy, memory)
