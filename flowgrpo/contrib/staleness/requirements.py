"""Runs that can draw epochs ahead of their update, or go on with partial rollouts."""

from __future__ import annotations

from flowgrpo.config.schema import Config
from flowgrpo.methods.method import Method
from flowgrpo.methods.setup import Setup
from flowgrpo.rewards.reward import EPOCH, MEMORY, POLICY, inside
from flowgrpo.text.credit.step_scores import StepScores
from flowgrpo.text.policies import engines
from flowgrpo.text.samplers.groups import Independent


def refused(setup: Setup) -> dict[str, bool]:
    """Return what keeps a run from staleness or partial rollouts, besides what it lacks, in words, and whether it
    applies."""
    config, method = setup.config, setup.method
    loss, parts = method.loss, [(name, part) for name, reward in setup.trained.items() for part in inside(reward)]
    wrong = {
        "memory.context_parallel, whose first process scores": config.memory.context_parallel > 1,
        f"a method that trains {method.target.trains}": not method.target.has_logp,
        f"the surrogate {type(loss.surrogate).__name__}, which compares samples": loss.surrogate.reads_groups,
        f"the reference {type(loss.reference).__name__}, whose prompts are of one epoch": method.teaches_itself,
        "memory.rewards: cpu": config.memory.rewards == "cpu"}
    if config.text.over_provision:
        wrong = {f"{setup.all_processes} processes": setup.all_processes > 1} | wrong | _of_partial(config, method)
    wrong |= {f"the reward {name!r}, which remembers earlier epochs": True for name, part in parts
              if {MEMORY, EPOCH} & part.reads}
    return wrong | {f"the reward {name!r}, which reads the policy": True for name, part in parts
                    if POLICY in part.reads}


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
