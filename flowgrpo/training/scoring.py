"""Rewards of a run while it trains: calls, weights, and the epoch's metrics."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, TypeAlias, cast

import torch

from flowgrpo import rewards
from flowgrpo.advantages.group import group_std, weighted_sum, zero_variance
from flowgrpo.advantages.token_credit import select_weights
from flowgrpo.config.reward_rules import Limit
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import put_away
from flowgrpo.distributed import signals
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.evaluation.report.snapshots import Extremes
from flowgrpo.nouns import quantity
from flowgrpo.rewards import Composed
from flowgrpo.rewards.pairwise import pairing
from flowgrpo.rollouts.base import Outputs

RewardFunctions: TypeAlias = dict[str, Composed | Callable[..., Any]]  # rewards by name


class Limits:
    """Constraints of a run's rewards: a multiplier per limited reward, in place of its weight (Safe RLHF-V).

        reward: {helpful: 1.0, unsafe: {limit: {at_most: 0.1, rate: 0.05}}}

    After each epoch's scores, lambda <- max(0, lambda + rate (J - d)): J the mean cost of all samples, before
    transforms, and d the limit. The rewards' weights of that epoch's advantages are w / (1 + sum lambda), and those of
    the costs -lambda / (1 + sum lambda), as in Safe RLHF's A = (A_R - lambda A_C) / (1 + lambda). `at_least` bounds a
    reward from below; its multiplier counts with a plus.

    limits: by name. memory: the run's, which a checkpoint holds.
    """

    def __init__(self, limits: Mapping[str, Limit], memory: dict[str, Any]):
        self.limits, self.memory = dict(limits), memory

    @property
    def multipliers(self) -> dict[str, float]:
        known = self.memory.get("limits", {})
        return {name: known.get(name, limit.start) for name, limit in self.limits.items()}

    def reward_weights(self, weights: Mapping[str, float]) -> dict[str, float]:
        multipliers = self.multipliers
        signed = {name: limit.sign * multipliers[name] for name, limit in self.limits.items()}
        return {name: signed.get(name, weight) / (1 + sum(multipliers.values())) for name, weight in weights.items()}

    def learn(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Move the multipliers by an epoch's mean rewards; return metrics of violations and multipliers.
        A reward without a score in the epoch keeps its multiplier."""
        violations = {name: limit.violation(metrics[f"reward/{name}/mean"]) for name, limit in self.limits.items()}
        moved = {name: multiplier if math.isnan(violations[name]) else
                 max(0.0, multiplier + self.limits[name].rate * violations[name])
                 for name, multiplier in self.multipliers.items()}
        if moved:
            self.memory["limits"] = moved
        return {f"limit/{name}/multiplier": value for name, value in moved.items()} | {
            f"limit/{name}/violation": value for name, value in violations.items()}


class Scoring:
    """R rewards of groups of one size, computed by one thread at a time.

    functions: by name, plain or `Composed`.
    policy: the model that is trained, for rewards that read it.
    weights: theirs, by name; of limited ones, and where some are limited of all, under the present multipliers.
    memory: the run's, in which constraints keep their multipliers.
    progress: share of the run, 0 in the first epoch and 1 in the last, for transforms that move over it.
    extremes: the best and the worst samples of the epoch, for display.
    spreads: of each in the last epoch, the mean deviation within groups, times its weight.
    reward_failures: samples on which each has failed since the run began, on all processes.
    """

    def __init__(self, functions: RewardFunctions, weights: dict[str, float], group: int, processes: Processes,
                 memory: dict[str, Any] | None = None, policy: Any = None):
        self.functions, self.given, self.group, self.processes = functions, weights, group, processes
        limited = rewards.limits_of(functions)
        self.limits = Limits(limited, {} if memory is None else memory) if limited else None
        self.progress = 0.0
        self.compares = any(map(rewards.sees_base, functions.values()))  # reads the base model's samples
        self.reads_latents = any(map(rewards.scores_latents, functions.values()))
        self.waits = any(map(rewards.reads_sampler, functions.values()))  # until all samples are drawn
        self.transforms = any(map(rewards.transforms_of, functions.values()))  # a rule changes scores
        self.paired = [pairing(function) is not None for function in functions.values()]
        self.reward_failures: dict[str, int] = {}
        self.spreads: dict[str, float] = {}
        self._lock = Lock()
        self._diversities: dict[int, list[float]] = {}  # by turn, the diversity of every group
        self.extremes, self._tally = Extremes(list(functions)), rewards.Tally()
        self._before = {0: (self.extremes, self._tally)}  # by the present turn: samples of the turns before it
        memories = {"memory": None} if rewards.remembers(functions) else {}
        # What rewards read of the run.
        self._read: dict[str, Any] = memories | {"policy": policy, "epoch": None, "fps": getattr(policy, "fps", None),
                                                 "training": True}
        self._unscored = False  # an epoch without any score was reported

    @property
    def reads_outputs(self) -> bool:
        """True if samples are decoded: not where all rewards score latents."""
        return not all(map(rewards.scores_latents, self.functions.values()))

    @property
    def errors(self) -> dict[str, str]:
        return self._tally.errors

    @property
    def weights(self) -> dict[str, float]:
        return self.given if self.limits is None else self.limits.reward_weights(self.given)

    def start_epoch(self, epoch: int, epochs: int, memory: dict[str, Any]) -> None:
        """Start an epoch for rewards and transforms that move over the run. memory: of the run."""
        self.progress = epoch / max(1, epochs - 1)
        if "memory" in self._read:
            rewards.require_memory(self.functions, self.processes.count)
            self._read["memory"] = memory.setdefault("rewards", {})
        self._read["epoch"] = epoch

    def end_epoch(self) -> None:
        """End an epoch's rollouts: what rewards score from here on is of no epoch, and they do not remember it."""
        self._read["epoch"] = None

    def start_turn(self, turn: int = 0) -> None:
        """Start a turn of an epoch, from 0. A repeated start drops the turn's samples."""
        if not turn:
            self._before = {0: (Extremes(list(self.functions)), rewards.Tally(errors=self.errors))}
        elif turn not in self._before:
            self._before = {turn: (self.extremes, self._tally)}
        earlier = {before: values for before, values in self._diversities.items() if before < turn}
        self._diversities = earlier | {turn: []}
        extremes, tally = self._before[turn]
        self.extremes = replace(extremes, best=[*extremes.best], worst=[*extremes.worst])
        self._tally = replace(tally, failed=tally.failed.copy(), said=tally.said.copy(), errors=self.errors)

    def fork(self) -> "Scoring":
        """A copy that counts and keeps samples of another epoch; rewards and their lock are shared."""
        other = copy.copy(self)
        other.start_turn()
        return other

    def adopt(self, other: "Scoring") -> None:
        """Take over the samples, failures and diversities of a copy."""
        self.extremes, self._tally, self._diversities, self._before = (
            other.extremes, other._tally, other._diversities, other._before)

    def found(self) -> tuple[Extremes, rewards.Tally, list[float]]:
        """Samples for display, failures and diversities of a copy of one turn, for the copy of another process."""
        return self.extremes, self._tally, self._diversities[0]

    def add_found(self, extremes: Extremes, tally: rewards.Tally, diversities: list[float]) -> None:
        """Add what another process has found, to a copy that has judged nothing."""
        for total, prompt, scores, output in extremes.best + extremes.worst:
            self.extremes.add([prompt], [output], *(torch.tensor([each]).double() for each in (scores, total)))
        self._tally.failed.update(tally.failed)
        self._tally.said.update(tally.said)
        self._tally.errors.update(tally.errors)
        self._diversities[0] += diversities

    def diversities(self, curriculum: Any, groups: int) -> list[float]:
        """The diversity of every group of the last turn of all processes; none where none is read, or groups have none.
        """
        if not getattr(curriculum, "reads_diversity", False):
            return []
        last = self._diversities[max(self._diversities)] if self._diversities else []
        values = self.processes.gather(torch.tensor(last))
        return values.view(groups, -1).mean(1).tolist() if len(values) and len(values) % groups == 0 else []

    def where_read(self, outputs: Outputs | None, behind: bool) -> Outputs | None:
        """Outputs where rewards read them: on their GPU if one does and none is behind, else queued for the CPU."""
        if not torch.is_tensor(outputs) or not behind and any(rewards.reads_on(str(outputs.device), function)
                                                              for function in self.functions.values()):
            return outputs
        return put_away(outputs, torch.device("cpu"))

    def latents(self, finals: Sequence[torch.Tensor], count: int) -> list[torch.Tensor | None]:
        """The clean latents of `count` granularities on the CPU, in fp32; None where no reward scores them."""
        return [final.float().cpu() for final in finals] if self.reads_latents else [None] * count

    def judge(self, batch: list[Prompt], rows: torch.Tensor, outputs: Outputs | None,
              latents: torch.Tensor | None = None, base: torch.Tensor | None = None) -> torch.Tensor:
        """Call `score` for samples that are trained on, and keep the best and the worst decoded ones for display."""
        scores = self.score(batch, rows, outputs, self.group, base, latents)
        if outputs is not None:
            totals = self.sum_rewards(scores.unflatten(0, (-1, self.group))).flatten()
            self._diversities.setdefault(max(self._diversities, default=0), []).extend(diversity(outputs, self.group))
            self.extremes.add([batch[p] for p in rows], outputs, scores, totals)
        return scores

    def score(self, batch: list[Prompt], rows: torch.Tensor, outputs: Outputs | None, group: int,
              base: torch.Tensor | None = None, latents: torch.Tensor | None = None) -> torch.Tensor:
        """The rewards [b,R] of outputs of the prompts `rows` [b], whole groups of the given size.
        outputs: None where nothing is decoded. base: the base model's outputs. latents: the clean latents."""
        return self._score(self.functions, [batch[p] for p in rows], outputs, group, base, latents)

    def _score(self, functions: RewardFunctions, of: list[Prompt], outputs: Outputs | None, group: int,
               base: torch.Tensor | None, latents: torch.Tensor | None) -> torch.Tensor:
        if not self.processes.reports:  # the scores of its team's first member are taken
            return torch.zeros(len(of), len(functions))

        def call() -> torch.Tensor:
            with self._lock:
                return rewards.score(functions, outputs, [p.text for p in of], [p.metadata for p in of], group,
                                     self._tally, base, latents, **self._read)

        return signals.promptly(call)

    def total(self, batch: list[Prompt], outputs: Outputs | None, group: int, rows: torch.Tensor | None = None,
              latents: torch.Tensor | None = None, names: Sequence[str] = ()) -> torch.Tensor:
        """The weighted sum of rewards [.,group] of outputs of the prompts `rows`, group for each; None: of all in turn.
        names: of the rewards that count; empty: all."""
        rows = torch.arange(len(batch)).repeat_interleave(group) if rows is None else rows
        weights = select_weights(self.weights, names)
        functions = {name: self.functions[name] for name in weights}
        scores = self._score(functions, [batch[p] for p in rows], outputs, group, None, latents)
        scores = scores.unflatten(0, (-1, group))
        shaped = rewards.transform_scores(functions, scores) if self.transforms else scores
        return weighted_sum(shaped, list(weights.values()))

    def value(self, batch: list[Prompt], rows: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the differentiable rewards [b] of images of the prompts `rows` [b], with its gradient."""
        of, functions = [batch[p] for p in rows], rewards.with_gradient(self.functions)
        return rewards.value(functions, self.weights, images, [p.text for p in of], [p.metadata for p in of])

    def offload(self) -> None:
        """Move the rewards' weights off their devices where `memory.rewards` says so."""
        rewards.leave(self.functions.values())

    def transform(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [P,G,R] after the rewards' transforms, float64, in every granularity that R holds."""
        scores = scores.double()
        return rewards.transform_scores(self.functions, scores, self.progress) if self.transforms else scores

    def sum_rewards(self, scores: torch.Tensor) -> torch.Tensor:
        """`weighted_sum` [P,G] of scores [P,G,R], after the rewards' transforms."""
        return weighted_sum(self.transform(scores), list(self.weights.values()))

    def metrics(self, grouped: torch.Tensor, log: Callable[[str], None]) -> dict[str, float]:
        """The metrics of scores [groups,G,R], in the first granularity.
        Per reward, before its transforms: mean, deviation and number of failures. After them: the share, of the groups
        it applies to, whose samples all score the same."""
        metrics: dict[str, Any] = {}
        failed, weights = self._take_failures(log), self.weights
        for name, scores, compared in zip(self.functions, grouped.unbind(-1), self.transform(grouped).unbind(-1)):
            present = scores[~scores.isnan()].double()
            spread = present.std().item() if len(present) > 1 else 0.0
            groups = compared[~compared.isnan().all(1)]
            self.spreads[name] = abs(weights[name]) * group_std(groups).mean().item()
            metrics |= {f"reward/{name}/mean": present.mean().item(), f"reward/{name}/std": spread,
                        f"reward/{name}/failed": failed[name],
                        f"reward/{name}/zero_variance_groups": zero_variance(groups).float().mean().item()}
        diversities = torch.tensor([value for values in self._diversities.values() for value in values])
        diversities = self.processes.gather(diversities)
        return metrics | ({"diversity": diversities.mean().item()} if len(diversities) else {})

    def epoch_metrics(self, groups: Any, epoch: int, log: Callable[[str], None]) -> dict[str, float]:
        """The metrics of an epoch's first turn. Raises UserError if no sample of the first epoch has a score."""
        metrics = self.metrics(groups.first, log)
        self.require_scores(metrics, groups.prompts[0].text, epoch, log)
        return metrics

    def require_scores(self, metrics: dict[str, float], prompt: str, epoch: int, log: Callable[[str], None]) -> None:
        """Raise UserError if no sample of the first epoch, 0, has a score, though none was left out as a failure.
        In later epochs it is reported, once. prompt: an example from the epoch, for the message."""
        means, failed = ([metrics[f"reward/{name}/{what}"] for name in self.functions] for what in ("mean", "failed"))
        if not all(map(math.isnan, means)):
            return
        names = " or ".join(map(repr, self.functions))
        if not epoch and not any(failed):
            raise UserError(f"no sample of the first epoch had a score from {names}: expected prompts to which it "
                            f"applies, with the metadata that it reads, got such as {prompt[:60]!r}")
        if not self._unscored:
            log(f"no sample of epoch {epoch + 1} had a score from {names}: nothing is trained in such epochs")
        self._unscored = True

    def _take_failures(self, log: Callable[[str], None]) -> dict[str, int]:
        """Report, count and add up the samples on which each reward failed in this epoch, on all processes."""
        tally, names = self._tally, list(self.functions)
        failed = dict(zip(names, self.processes.total([tally.failed[name] for name in names])))
        self.reward_failures = {name: self.reward_failures.get(name, 0) + count for name, count in failed.items()}
        for name, said in tally.said.items():
            log(f"left out: {quantity(failed[name], 'sample')} that a reward failed on; the last: {said}")
        tally.failed.clear()
        tally.said.clear()
        return failed


def diversity(outputs: Outputs, group: int) -> list[float]:
    """Mean distance between the samples of every group; empty for groups of one.
    Images and videos: the mean standard deviation of a value in [0, 1], over a grid of at most 64 x 64 pixels. Texts:
    the share of the samples that repeat none before them."""
    values = []
    for start in range(0, len(outputs), group) if group > 1 else ():
        samples = outputs[start:start + group]
        if isinstance(samples[0], str):
            values.append((len({*samples}) - 1) / (len(samples) - 1))
            continue
        steps = [max(1, size // 64) for size in samples[0].shape[-2:]]
        shown = torch.stack([cast(torch.Tensor, sample)[..., ::steps[0], ::steps[1]].float() for sample in samples])
        values.append(shown.std(0).mean().item())
    return values
