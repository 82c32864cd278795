"""Rollout ranks (`train.rollout_ranks`): the last processes of a run sample and score, the others train meanwhile.

With `train.staleness` N, epoch k is drawn by the weights after k - N epochs, or the first ones, whatever is faster: the
run is that of one process with the same staleness. Samples, old log-probabilities and scores go to the processes that
train their groups, point to point; the trained weights come back by a broadcast after each epoch. A checkpoint holds
the weights by which the next N epochs are drawn, so that a resumed run draws them again.
"""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor, distributed

from flowgrpo.config.geometry import geometry, prompts_per_part
from flowgrpo.config.schema import Config
from flowgrpo.contrib.features import StalenessKeys
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import AUTO
from flowgrpo.distributed import signals
from flowgrpo.distributed.sides import Side
from flowgrpo.distributed.signals import TICK, Stopped
from flowgrpo.errors import UserError
from flowgrpo.rollouts.base import Encoded, Outputs
from flowgrpo.samplers.rollout import Part
from flowgrpo.storage.checkpoint import Tensors
from flowgrpo.training import sampling
from flowgrpo.training.extension import Run
from flowgrpo.training.scoring import Scoring
from flowgrpo.training.state import SAMPLING, restore_part, store_part
from flowgrpo.types import unwrap

KEY = "train.rollout_ranks"


def rollout_ranks(config: Config, processes: int) -> int:
    """Number of processes that only sample. Raises UserError if the groups cannot be shared out to that number."""
    train, count = config.train, StalenessKeys.read(config).rollout_ranks
    if not count:
        return 0
    if count >= processes:
        raise UserError(f"{KEY} is {count}, of {processes} process{'es' * (processes > 1)}: expected fewer, so that "
                        "one at least trains; torchrun or accelerate launch starts several")
    if AUTO in (train.micro_batch, train.checkpointing):
        raise UserError(f"{KEY} is {count}, which does not go with train.micro_batch or train.checkpointing: auto: set "
                        "values")
    sides = {processes - count: "train", count: "only sample"}
    for size, do in sides.items():
        if train.prompts % size:
            raise UserError(f"{KEY} is {count}, but train.prompts is {train.prompts}, which the {size} processes that "
                            f"{do} cannot share in whole groups: use {-(-train.prompts // size) * size} prompts")
        geometry(train, size)
    # A part is trained where its groups are: no share of a process that trains may end amid one.
    share, together = train.prompts // count, prompts_per_part(train.group, train.rows)
    ends = {place // share * share + min(place % share // together * together, share) for place in range(train.prompts)}
    own = train.prompts // (processes - count)
    if not {*range(0, train.prompts, own)} <= ends:
        raise UserError(f"{KEY} is {count}, whose micro-batches of {train.rows} take {together} groups together, which "
                        f"do not divide the {own} groups of each process that trains: use a micro_batch of "
                        f"{train.group}")
    return count


@dataclass(eq=False)
class Drawn:
    """Epoch that is drawn and waits for its update.

    batch: its prompts on all processes; prompts: those of this one.
    at: the epoch before whose update it was drawn; update: the optimizer updates of the oldest weights that drew it.
    older: of partial rollouts, the number of tokens that older weights than the present ones drew, and of all.
    conditioning, scoring, scorer: None until an epoch of a checkpoint is scored again.
    pending: the futures of the scores of every part, one per granularity.
    """

    epoch: int
    at: int
    update: int
    batch: list[Prompt]
    prompts: list[Prompt]
    parts: list[Part] = field(default_factory=list)
    outputs: list[Sequence[Outputs | None]] = field(default_factory=list)
    older: tuple[int, int] = (0, 1)
    conditioning: Encoded | None = None
    scoring: Scoring | None = None
    scorer: sampling.Scorer | None = None
    pending: list[Future[Tensor]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Version:
    """Trained weights that an epoch is drawn by: those after `epoch` epochs, fp32 [n] on the CPU. update: optimizer
    updates so far; memory: the run's, which curricula read."""

    epoch: int
    update: int
    memory: dict[str, Any]
    weights: Tensor

    @torch.no_grad()
    def enter(self, run: Run) -> None:
        """Make the run one that has trained so far."""
        named = run.policy.weights.named
        pieces = self.weights.split([parameter.numel() for parameter in named.values()])
        run.policy.weights.load({key: piece.view(named[key].shape) for key, piece in zip(named, pieces)})
        run.epoch, run.optimization.update = self.epoch, self.update
        run.memory.clear()
        run.memory |= copy.deepcopy(self.memory)


class RolloutRanks:
    """Traffic between both sides. kept: versions by which epochs may still be drawn, oldest first. weight_bytes: that
    the present epoch has sent to all that sample; sample_bytes: that it has received here."""

    def __init__(self, run: Run, side: Side, bound: int):
        self.run, self.side, self.bound = run, side, bound
        self.samplers = range(side.trains, side.trains + side.rollouts)
        self.kept: list[Version] = []
        self.weight_bytes = self.sample_bytes = 0
        self._coming: dict[int, Future[Any]] = {}  # messages that are waited for, by their sender
        self._versions, self._drawn = SimpleQueue[Version](), SimpleQueue[tuple[Drawn, list[int]] | None]()

    # --- processes that train ----------------------------------------------------------------------------------------

    def lead(self, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The summary of `train()`, which those that only sample get too; a stop ends them."""
        for version in self.kept if self.run.processes.first else ():
            self._send(version)
        self.publish(self.run.epoch)
        with closing(self):
            try:
                summary = train()
            except Stopped:
                self._end(None)
                raise
            self._end(summary)
        return summary

    def publish(self, epoch: int) -> None:
        """Send the weights after so many epochs."""
        run = self.run
        if run.processes.first:
            weights = torch.cat([values.float().flatten() for values in run.policy.weights.snapshot().values()])
            version = Version(epoch, run.optimization.update, copy.deepcopy(run.memory), weights)
            self.kept = [each for each in self.kept if epoch - self.bound <= each.epoch < epoch] + [version]
            self._send(version)

    def _send(self, version: Version) -> None:
        distributed.broadcast_object_list([replace(version, weights=torch.empty(0))], 0, self.side.down)
        distributed.broadcast(version.weights, 0, self.side.down)
        self.weight_bytes += version.weights.nbytes * len(self.samplers)

    def _end(self, summary: dict[str, Any] | None) -> None:
        """Send the summary, or None after a stop, and drop what was drawn in vain."""
        if self.run.processes.first:
            distributed.broadcast_object_list([summary], 0, self.side.down)
        for rank in self.samplers:
            while self._next(rank, lambda: None) is not None:
                pass

    def receive(self) -> list[dict[str, Any]]:
        return [self._next(rank, self.run.stop.check) for rank in self.samplers]

    def _next(self, rank: int, check: Callable[[], None]) -> Any:
        def message() -> Any:
            box: list[Any] = [None]
            distributed.recv_object_list(box, rank, self.side.up)
            return box[0]

        if rank not in self._coming:
            self._coming[rank] = signals.start_thread(message)
        while not wait([self._coming[rank]], TICK).done:
            check()
        return self._coming.pop(rank).result()

    def assemble(self, messages: list[dict[str, Any]]) -> tuple[Drawn, Tensor]:
        """The epoch of the messages with this process's parts, and the scores [P,G,R] of all."""
        run, first = self.run, messages[0]
        drawn = Drawn(first["epoch"], first["at"], first["update"], first["batch"], run.processes.own(first["batch"]))
        drawn.conditioning, drawn.scoring = run.rollouts.conditioning(drawn.prompts, drawn.epoch), run.scoring.fork()
        share = len(drawn.batch) // len(messages)
        for place, message in enumerate(messages):
            shift = place * share - run.processes.rank * len(drawn.prompts)
            for tensors, values in message["parts"]:
                part = restore_part(tensors, values, run.rollouts, drawn.epoch)
                drawn.parts.append(part.shifted(shift, shift))
                self.sample_bytes += sum(tensor.nbytes for tensor in tensors.values())
            if run.processes.rank == 0:  # it counts and shows for all
                drawn.scoring.add_found(*message["found"])
                run.policy.evaluations += message["spent"][0]
        for name, more in zip(SAMPLING, first["spent"][1:], strict=True):  # of all processes that sample
            setattr(run.rollouts, name, getattr(run.rollouts, name) + more)
        run.progress.sampled += len(drawn.batch) * run.config.train.group
        return drawn, torch.cat([message["scores"] for message in messages])

    def bytes(self) -> dict[str, int]:
        """Bytes since the last call, as metrics, on all processes."""
        weights, samples = self.run.processes.total([self.weight_bytes, self.sample_bytes])
        self.weight_bytes = self.sample_bytes = 0
        return {"rollout_ranks/weight_bytes": weights, "rollout_ranks/sample_bytes": samples}

    def close(self) -> None:
        self.side.whole.end_training()

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """The versions before the present one, by which a resumed run draws its first epochs."""
        older = [each for each in self.kept if each.epoch < self.run.epoch]
        return ({f"version.{each.epoch}": each.weights for each in older},
                {"versions": [[each.epoch, each.update, each.memory] for each in older]})

    def load_state(self, tensors: Tensors, values: dict[str, Any]) -> None:
        self.kept = [Version(epoch, update, memory, tensors[f"version.{epoch}"])
                     for epoch, update, memory in values.get("versions", ())]

    # --- processes that only sample ----------------------------------------------------------------------------------

    def follow(self, draw: Callable[[int], Drawn]) -> dict[str, Any]:
        """Draw epochs by the weights that come, until the training has ended; return its summary.
        Raises Stopped after a stop, and the error of a reward."""
        run, self.kept = self.run, []
        ended = signals.start_thread(self._listen)
        delivering = signals.start_thread(partial(self._deliver, ended))
        with closing(self), run.stop:
            try:
                for epoch in range(run.epoch, run.config.train.epochs):
                    if not self._enter(epoch - self.bound, ended, delivering):
                        break
                    with run.extensions.around_epoch():
                        before = self._spent()
                        drawn = draw(epoch)
                        self._drawn.put((drawn, [now - then for now, then in zip(self._spent(), before)]))
            except Stopped:
                pass  # the others stop too, and say so
            while not wait([ended], TICK).done:
                if delivering.done():
                    delivering.result()
            self._drawn.put(None)
            delivering.result()
        if (summary := ended.result()) is None:
            raise Stopped
        return summary

    def _spent(self) -> list[int]:
        return [self.run.policy.evaluations, *(getattr(self.run.rollouts, name) for name in SAMPLING)]

    def _enter(self, least: int, ended: Future[Any], delivering: Future[None]) -> bool:
        """Take versions, one at least, until one of `least` epochs is the run's; False if the training has ended."""
        run, entered = self.run, bool(self.kept)
        while not entered or run.epoch < least:
            try:
                version = self._versions.get(timeout=TICK)
            except Empty:
                run.stop.check()
                for future in (delivering, ended):  # raises their errors
                    if future.done():
                        future.result()
                if ended.done():
                    return False
                continue
            version.enter(run)
            self.kept, entered = [version], True
        return not ended.done()

    def _listen(self) -> dict[str, Any] | None:
        """Take the versions that come; return the summary at the end."""
        size = sum(parameter.numel() for parameter in self.run.policy.weights.named.values())
        while True:
            box: list[Any] = [None]
            distributed.broadcast_object_list(box, 0, self.side.down)
            if not isinstance(box[0], Version):
                return box[0]
            weights = torch.empty(size)
            distributed.broadcast(weights, 0, self.side.down)
            self._versions.put(replace(box[0], weights=weights))

    def _deliver(self, ended: Future[Any]) -> None:
        """Send epochs as they are scored, to each process what it trains; at the end say that no more comes."""
        run, side = self.run, self.side
        while (entry := self._drawn.get()) is not None:
            drawn, spent = entry
            while not ended.done() and wait(drawn.pending, TICK).not_done:
                pass
            if ended.done():
                unwrap(drawn.scorer).end(drop=True)
                continue
            scores = sampling.columns(run, [future.result() for future in drawn.pending])
            about = {"epoch": drawn.epoch, "at": drawn.at, "update": drawn.update, "batch": drawn.batch,
                     "scores": scores, "spent": spent, "found": unwrap(drawn.scoring).found()}
            # To each process the parts that it trains.
            own, first = len(drawn.batch) // side.trains, run.processes.rank * len(drawn.prompts)
            for part in drawn.parts:
                if (first + part.groups.start) // own != (first + part.groups.stop - 1) // own:
                    raise UserError(f"{KEY}: a micro-batch that was lowered for memory takes groups of two processes "
                                    "that train: lower train.micro_batch")
            for rank in range(side.trains):
                parts = [store_part(part) for part in drawn.parts if (first + part.groups.start) // own == rank]
                distributed.send_object_list([about | {"parts": parts}], rank, side.up)
        for rank in range(side.trains):
            distributed.send_object_list([None], rank, side.up)
