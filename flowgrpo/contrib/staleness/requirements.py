"""Runs that can draw epochs ahead of their update, or go on with partial rollouts."""

from __future__ import annotations

from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError
from flowgrpo.methods.method import Method
from flowgrpo.methods.setup import Setup
from flowgrpo.objectives import references
from flowgrpo.rewards.reward import EPOCH, MEMORY, POLICY, inside
from flowgrpo.text.credit.step_scores import StepScores
from flowgrpo.text.policies import engines
from flowgrpo.text.samplers.groups import Independent
from flowgrpo.training.stored_parts import unrecordable


def check(setup: Setup) -> None:
    """Raise UserError for a run that cannot have staleness or partial rollouts."""
    config, method, processes = setup.config, setup.method, setup.all_processes
    staleness, extra = config.train.staleness, config.text.over_provision
    if not staleness and not extra:
        return
    parts = [(name, part) for name, reward in setup.trained.items() for part in inside(reward)]
    wrong = unrecordable(config, method) | {
        f"{processes} processes": processes > 1,
        f"a method that trains {method.target.trains}": not method.target.has_logp,
        f"the surrogate {type(method.loss.surrogate).__name__}, which compares samples":
            method.loss.surrogate.reads_groups,
        "parts.redraw, which waits for the rewards": method.redraw is not None,
        "parts.expansion, whose samples are drawn under other prompts": method.expansion is not None,
        "parts.replay, which has ratios of its own": method.replay is not None,
        "parts.lag, whose old policy draws": bool(method.rollout.lag.most),
        "a self-teacher, whose prompts are of one epoch": isinstance(method.loss.reference, references.SelfTeacher),
        "text encoders that are trained": not method.for_tokens and method.denoising.adapted.encoders,
        "memory.rewards: cpu": config.memory.rewards == "cpu"} | (_of_partial(config, method) if extra else {})
    wrong |= {f"the reward {name!r}, which remembers earlier epochs": True for name, part in parts
              if {MEMORY, EPOCH} & part.reads}
    wrong |= {f"the reward {name!r}, which reads the policy": True for name, part in parts if POLICY in part.reads}
    key = f"text.over_provision is {extra:g}" if extra else f"train.staleness is {staleness}"
    for reason in (reason for reason, applies in wrong.items() if applies):
        raise UserError(f"{key}, which does not go with {reason}: leave one of them out")


def _of_partial(config: Config, method: Method) -> dict[str, bool]:
    """Return what keeps completions from being continued, in words, and whether it applies."""
    rollout, spread = method.generation, method.credit.spread
    return {
        "text.engine or text.engine_precision, which draw whole completions": engines.wanted(config),
        f"parts.draws {type(rollout.draws).__name__}": not isinstance(rollout.draws, Independent),
        "greedy samples or answers in a group": bool(rollout.decoding.greedy or rollout.decoding.expert),
        f"parts.spread {type(spread).__name__}, which draws or scores segments":
            isinstance(spread, StepScores) or bool(spread and spread.samples),
        f"the surrogate {type(method.loss.surrogate).__name__}, which reads all tokens":
            method.loss.surrogate.reads_uniform}
