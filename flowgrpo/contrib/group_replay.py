"""Replay of recorded groups: earlier groups take the places of those whose samples all earn the same."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from scipy.special import softmax
from torch import Tensor

from flowgrpo.data.prompts import Guidance, Prompt, as_line, of_records
from flowgrpo.methods import capabilities
from flowgrpo.methods.setup import Setup
from flowgrpo.parts import AtLeast, part
from flowgrpo.samplers.rollout import Part
from flowgrpo.storage.checkpoint import within
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics, Run
from flowgrpo.training.state import record_of, restore_part, tensors_of


@part("replay")
class GroupReplay:
    """Buffer of the last `size` groups with advantages that are not all 0 (VL-Rethinker, 2504.08837;
    ExGRPO, 2510.02245).

    A group whose advantages are all 0 is replaced by a recorded one, drawn in proportion to |A|^alpha, its mean
    absolute advantage, while the buffer has any. A recorded group keeps its advantages and its log-probabilities, so
    that the ratio corrects for the policy's change since then. Groups older than `age` epochs are dropped.

    certain: the odds have the further factor exp(certain * mean log-probability of a decision), which prefers groups of
        low entropy, as ExGRPO does.
    more: recorded groups that are trained besides, as a share of the epoch's own (DOTS, 2506.05316).
    recompose: an epoch trains the shorter half of a group's right samples and the longer half of its wrong ones; the
        others wait in the buffer for the compensation batches of `more` (RoRecomp). Texts alone have lengths.

    VL-Rethinker draws single samples; here the unit is a group.
    """

    size: Annotated[int, AtLeast(1)] = 64
    age: Annotated[int, AtLeast(1)] = 10
    alpha: Annotated[float, AtLeast(0)] = 1.0
    certain: Annotated[float, AtLeast(0)] = 0.0
    more: Annotated[float, AtLeast(0)] = 0.0
    recompose: bool = False

    def odds(self, sizes: Sequence[float], logps: Sequence[float]) -> np.ndarray:
        """Probabilities of groups by their mean |advantages| and mean log-probabilities."""
        return softmax(self.alpha * np.log(np.array(sizes)) + self.certain * np.array(logps))

    def choose(self, sizes: Sequence[float], logps: Sequence[float], count: int, seed: Sequence[int]) -> list[int]:
        """Places of `count` different groups, or of all if there are fewer."""
        count = min(count, len(sizes))
        return np.random.default_rng(seed).choice(len(sizes), count, replace=False,
                                                  p=self.odds(sizes, logps)).tolist() if count else []


def priority(advantages: Tensor, lengths: Tensor) -> Tensor:
    """Samples [m] of a group that train at once: the shorter half, rounded up, of those with an advantage above 0, and
    the longer half of those below 0: bool [m]."""
    first = torch.zeros(len(advantages), dtype=torch.bool)
    for side, keys in ((advantages > 0, lengths), (advantages < 0, -lengths)):
        places = side.nonzero()[:, 0]
        first[places[keys[places].argsort(stable=True)[:-(-len(places) // 2)]]] = True
    return first


SALT = 7  # of the draws' seeds


@dataclass(eq=False)
class Recorded:
    """Recorded group: its prompt, the epoch that drew it, and its part, on the CPU, with advantages and step weights.

    size: its mean |advantage|. logp: the mean log-probability of its decisions.
    """

    prompt: Prompt
    epoch: int
    part: Part
    size: float
    logp: float


class ReplayedGroups(Extension):
    """Buffer of a run of one process, or of one team of processes."""

    name = "replay"
    needs = frozenset({capabilities.RECORDABLE})
    lacks = {capabilities.OWN_SAMPLES: "parts.replay, which trains samples of earlier epochs"}
    asked_by = "parts.replay is {0.method.replay.__class__.__name__}"

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        self.part, self.processes, self.seed = trainer.method.replay, trainer.processes, trainer.config.seed
        self.groups: list[Recorded] = []
        self.fresh: list[Recorded] = []
        self.ages: list[int] = []

    @classmethod
    def conflicts(cls, setup: Setup) -> dict[str, bool]:
        method, processes = setup.method, setup.processes
        assert method.replay is not None
        return {
            f"{processes} processes, of which a checkpoint holds the first one's groups": processes > 1,
            "parts.tuning, whose goals are of one epoch": method.tuning.weight > 0,
            "parts.replay.recompose, which reads lengths of texts": method.replay.recompose and not method.for_tokens}

    def on_credited(self, epoch: Epoch) -> None:
        """Put groups of earlier epochs in place of those without advantages, and record the others."""
        now, prompts = self.trainer.epoch, [prompt.learned for prompt in epoch.own]
        known = [group for group in self.groups if 0 < now - group.epoch <= self.part.age]
        single = {place: alone for part in epoch.parts for place in part.groups
                  if (alone := keep_groups(part, {place})) is not None}
        silent = [place for place, alone in single.items() if not size_of(alone)]
        taken = [known[place] for place in self.part.choose(
            [group.size for group in known], [group.logp for group in known],
            len(silent) + round(self.part.more * len(single)), [self.seed, now, self.processes.rank, SALT])]
        dropped = {*silent[:len(taken)]}
        fresh = {place: alone for place, alone in single.items() if place not in {*silent}}
        first = {place: priority(alone.advantages[0].cpu(), alone.transitions[0].old.mask.sum(1).cpu())
                 for place, alone in fresh.items()} if self.part.recompose else {}
        self.fresh = []
        for place, alone in fresh.items():
            waits: Part | None = alone
            if first:  # left out ones count where the others of the group are trained
                waits = replace(alone, left_out=()).with_advantages(
                    alone.advantages, [~first[place] for _ in alone.transitions], alone.rewards)
            if waits is not None and size_of(waits):
                self.fresh.append(record(waits, prompts[place], now, epoch.weights))
        self.ages = [now - group.epoch for group in taken]
        left = [keep_groups(part, {*part.groups} - dropped, first) if first or dropped & {*part.groups} else part
                for part in epoch.parts]
        epoch.parts = [part for part in left if part is not None] + [
            reindex(group.part, len(prompts) + number) for number, group in enumerate(taken)]
        if taken:
            replayed = [group.prompt for group in taken]
            epoch.conditioning = self.trainer.rollouts.conditioning([*prompts, *replayed], now)
            epoch.own = [*epoch.own, *replayed]

    def on_trained(self, epoch: Epoch) -> Metrics:
        self.groups = [group for group in [*self.groups, *self.fresh]
                       if self.trainer.epoch + 1 - group.epoch <= self.part.age][-self.part.size:]
        self.fresh = []
        count, ages = self.processes.total([len(self.ages), sum(self.ages)])
        return {"replayed_groups": count} | ({"replay_age": ages / count} if count else {})

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        listed = []
        for number, group in enumerate(self.groups):
            for k, taken in enumerate(group.part.transitions):
                tensors |= {f"{number}.{k}.{name}": value.clone() for name, value in tensors_of(taken).items()}
                tensors[f"{number}.{k}.advantage"] = group.part.advantages[k]
                tensors[f"{number}.{k}.reward"] = group.part.rewards[k]
            kinds = [[type(taken).__name__, taken.step] for taken in group.part.transitions]
            guided = {"guided": asdict(group.prompt.guided)} if group.prompt.guided else {}
            listed.append(guided | {"prompt": as_line(group.prompt), "epoch": group.epoch, "size": group.size,
                           "logp": group.logp, "steps": kinds, "left_out": len(group.part.left_out),
                           "weights": [*map(list, (group.part.weights or {}).items())]})
        return tensors, {"groups": listed}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self.groups = []
        for number, entry in enumerate(values.get("groups", ())):
            own, steps = within(tensors, f"{number}."), range(len(entry["steps"]))
            advantages, totals = (tuple(own.pop(f"{k}.{name}") for k in steps) for name in ("advantage", "reward"))
            own["prompts"] = torch.zeros(len(advantages[0]), dtype=torch.int64)
            part = restore_part(own, entry | {"groups": [0, 1], "finals": 0}, self.trainer.rollouts, entry["epoch"])
            part = replace(part, advantages=advantages, rewards=totals, weights=dict(entry["weights"]),
                           left_out=(0,) * entry.get("left_out", 0))
            [prompt] = of_records([entry["prompt"]])
            prompt = replace(prompt, guided=Guidance(**entry["guided"])) if "guided" in entry else prompt
            self.groups.append(Recorded(prompt, entry["epoch"], part, entry["size"], entry["logp"]))


def record(part: Part, prompt: Prompt, epoch: int, weights: dict[int, float]) -> Recorded:
    """Group with its tensors on the CPU and the weights of its steps."""
    transitions = tuple(record_of(type(taken).__name__, taken.step, tensors_of(taken)) for taken in part.transitions)
    old = [taken.old for taken in transitions]
    logp = sum((each.logp * each.mask).sum().item() for each in old) / max(sum(int(each.mask.sum()) for each in old), 1)
    steps = {taken.step: weights[taken.step] for taken in transitions}
    kept = replace(part, transitions=transitions, finals=(), seeds=None, weights=steps, measured={},
                   advantages=tuple(advantage.cpu() for advantage in part.advantages),
                   rewards=tuple(total.cpu() for total in part.rewards))
    return Recorded(prompt, epoch, reindex(kept, 0), size_of(kept), logp)


def keep_groups(part: Part, places: set[int], samples: dict[int, Tensor] = {}) -> Part | None:
    """Part of some groups alone, and of some of these only samples, bool; None if nothing of it is trained."""
    masks = []
    for taken in part.transitions:
        of = taken.prompts[taken.parent].cpu()
        keep = torch.isin(of, torch.tensor([*places], dtype=torch.int64))
        for place in places & samples.keys():
            keep[of == place] = samples[place]
        masks.append(keep)
    part = replace(part, left_out=tuple(place for place in part.left_out if place in places))
    return part.with_advantages(part.advantages, masks, part.rewards)


def reindex(part: Part, place: int) -> Part:
    """Part of one group as the group `place` of an epoch, with the prompt of that place."""
    transitions = tuple(replace(taken, prompts=torch.full_like(taken.prompts, place)) for taken in part.transitions)
    return replace(part, groups=range(place, place + 1), prompts=torch.full_like(part.prompts, place),
                   transitions=transitions, left_out=(place,) * len(part.left_out))


def size_of(part: Part) -> float:
    """Mean |advantage| of a part's trained decisions."""
    values = torch.cat([advantage.flatten().abs() for advantage in part.advantages])
    return values.double().mean().item()
