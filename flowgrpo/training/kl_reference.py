"""What a run's KL holds the policy to, and how strongly, from epoch to epoch; some surrogates compare with it too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from flowgrpo.methods.method import Method
from flowgrpo.objectives import in_epoch, regularises
from flowgrpo.samplers.rollout import Part
from flowgrpo.types import Context, Scored

Snapshot = dict[str, torch.Tensor]
Replay = Callable[[Part], Iterator[tuple[int, torch.Tensor, Scored]]]


class Anchor:
    """A method's KL with its reference: the base model, snapshots of the trained weights, which are `held`, or a
    teacher.

    memory: of the method, in which the last epoch's KL is kept under "kl"; keep: whether an epoch has several passes,
    in which the reference's scores are the same.
    """

    def __init__(self, method: Method, policy: Any, memory: dict[str, Any], keep: bool):
        self.method, self.policy, self.memory, self.keep = method, policy, memory, keep
        self.held: list[Snapshot] = self.next([], 0)
        self.known: dict[int, list[Scored]] = {}
        self.kl = method.kl

    def begin(self, epoch: int, epochs: int) -> None:
        """Set the KL's weight for an epoch, and forget the last one's scores."""
        self.kl = in_epoch(self.method.kl, Context(epoch=epoch, epochs=epochs, memory=self.memory))
        self.known = {}

    def scores(self, part: Part, replay: Replay) -> list[Scored]:
        """The reference's scores of a part's transitions, where this epoch's KL or the surrogate asks for them."""
        if not self.kl.weight and not self.method.compares_with_reference:
            return []
        if id(part) in self.known:
            return self.known[id(part)]
        teacher = getattr(self.method.reference, "model", "")
        with self.policy.teacher(teacher) if teacher else self.policy.reference(self.held):
            scores = [score for _, _, score in replay(part)]
        if self.keep:
            self.known[id(part)] = scores = [score.to(self.policy.states) for score in scores]
        return scores

    def end(self, epoch: int, measured: float | None) -> dict[str, float]:
        """After an epoch's last update: remember its mean KL, if it was `measured`, and set up the next reference.
        Returns the KL's metrics."""
        self.known = {}  # not to be held through the next rollout
        if regularises(self.method.kl):
            self.memory["kl"] = {"weight": self.kl.weight, "measured": measured}
        self.held = self.next(self.held, epoch + 1)
        if not regularises(self.method.kl):
            return {}
        return {"kl_weight": self.kl.weight}

    def next(self, held: list[Snapshot], epoch: int) -> list[Snapshot]:
        """The snapshots that make an epoch's reference, from those held before and the weights it starts with."""
        if not regularises(self.method.kl) and not self.method.compares_with_reference:
            return []
        return self.method.reference(held, self.policy.weights.snapshot, epoch)
