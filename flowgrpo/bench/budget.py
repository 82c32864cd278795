"""Number of epochs that a budget of evaluations buys, known before anything runs.

Rows through a denoiser count in training: previews, rollouts, replays, replays of the reference where the method reads
it, those of epochs that are drawn ahead (`train.staleness`), and the check of the first ratio. Evaluation and backward
passes do not count. Tokens of a language model depend on what it writes: two measured epochs stand for the others. Rows
of some selections depend on the scores: one measured epoch gives their share of all rows.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from flowgrpo.advantages.selection import BestWorst
from flowgrpo.config.schema import Config
from flowgrpo.methods import validate
from flowgrpo.methods.method import Method
from flowgrpo.methods.targets import LatentEdits
from flowgrpo.samplers import cost
from flowgrpo.samplers.grids import shifted
from flowgrpo.samplers.reward_gradient import Unroll
from flowgrpo.samplers.rollout import RolloutSpec


def epoch_cost(config: Config, epoch: int, process: str = "flow") -> int:
    """Return the denoiser evaluations of one epoch, on a pipeline that doubles its batch under guidance.

    Recorded pairs are not drawn; what it took to draw them once is no epoch's.
    """
    return _cost(config, validate.resolve(config, process), epoch)


def _cost(config: Config, method: Method, epoch: int) -> int:
    """Return the evaluations of one epoch of a resolved method."""
    train = config.train
    drawn = method.target.edit.bases(train.group) if isinstance(method.target, LatentEdits) else train.group
    explorations = method.explorations(shifted(train.steps, train.shift), drawn, train.shift, epoch, config.seed)
    doubled = 2 if train.guidance > 1 else 1
    if method.target.follows_reward:
        target: Any = method.target  # a RewardGradient
        return doubled * _backprop_cost(config, target.backprop, explorations[0], epoch)
    if isinstance(method.target, LatentEdits):
        return doubled * cost.rollout(explorations, train.prompts)
    noised = method.noised(shifted(train.steps, train.shift), train.group, epoch, config.seed)
    share = kept(method, train.group)
    cut = method.loss.surrogate.reads_groups and (share * train.group > train.rows or train.pack)
    reference = method.loss.kl.weight > 0 or method.compares_with_reference  # whose scores serve all inner epochs
    measured = len(method.needs & {"entropy", "drift"})  # a replay each
    passes = train.inner_epochs * (1 + cut) + reference + measured + (epoch == 0)
    spent = 0 if config.preferences else cost.rollout(explorations, train.prompts)
    spent += round(share * cost.update([noised] if noised else explorations, train.prompts, passes))
    spent += cost.update([noised], train.prompts, 1) if noised else 0  # the old scores, before samples are chosen
    if train.staleness and epoch:  # the proximal policy's scores of all samples
        spent += cost.update(explorations, train.prompts, 1)
    spent += cost.preview(method.rollout.preview, train.prompts)
    return doubled * spent


def foretells(method: Method) -> bool:
    """Return True if `epoch_cost` is exact for a denoiser: scores do not decide how many samples are trained."""
    return method.credit.selection is None or isinstance(method.credit.selection, BestWorst)


def kept(method: Method, group: int) -> float:
    """Return the share of a group's samples that are trained, where their number is known beforehand; else 1."""
    return method.credit.selection.n / group if isinstance(method.credit.selection, BestWorst) else 1.0


def _backprop_cost(config: Config, ending: Any, exploration: RolloutSpec, epoch: int) -> int:
    """Return the cost of the rollout, and for every replay the steps of the graph."""
    [begin], train = exploration.schedule.trained, config.train
    steps = exploration.steps - begin if isinstance(ending, Unroll) else 1
    return train.prompts * train.group * (begin + steps * (1 + (epoch == 0) + train.inner_epochs))


def epochs_for(config: Config, budget: int, process: str = "flow", share: float = 1.0) -> tuple[int, int]:
    """Return the fewest epochs that reach the budget, and what they cost together.

    share: what an epoch costs, in `epoch_cost`.
    """
    total, method = 0, validate.resolve(config, process)
    for epoch in count():
        total += round(share * _cost(config, method, epoch))
        if total >= budget:
            break
    return epoch + 1, total


def epochs_of(first: int, following: int, budget: int) -> int:
    """Return the fewest epochs that reach the budget, from the measured cost of the first epoch and of the next."""
    return 1 + max(-(-(budget - first) // following), 0)
