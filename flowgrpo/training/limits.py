"""Constraints of a run: a multiplier per limited reward, which stands in place of its weight (Safe RLHF-V).

    reward: {helpful: 1.0, unsafe: {limit: {at_most: 0.1, rate: 0.05}}}

After each epoch's scores, lambda <- max(0, lambda + rate (J - d)): J the mean cost of all samples, before transforms,
and d the limit. The rewards' weights of that epoch's advantages are w / (1 + sum lambda), and those of the costs
-lambda / (1 + sum lambda), as in Safe RLHF's A = (A_R - lambda A_C) / (1 + lambda). `at_least` bounds a reward from
below; its multiplier counts with a plus.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flowgrpo.config.reward_rules import Limit


class Limits:
    """Constraints of a run's rewards. limits: by name. memory: the run's, which a checkpoint holds."""

    def __init__(self, limits: Mapping[str, Limit], memory: dict[str, Any] | None = None):
        self.limits, self.memory = dict(limits), {} if memory is None else memory

    @property
    def multipliers(self) -> dict[str, float]:
        """Return the present multipliers by name."""
        known = self.memory.get("limits", {})
        return {name: known.get(name, limit.start) for name, limit in self.limits.items()}

    def weighted(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return the weights of all rewards under the present multipliers; those given, without a constraint."""
        if not self.limits:
            return dict(weights)
        multipliers = self.multipliers
        signed = {name: limit.sign * multipliers[name] for name, limit in self.limits.items()}
        return {name: signed.get(name, weight) / (1 + sum(multipliers.values())) for name, weight in weights.items()}

    def learn(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Move the multipliers by an epoch's mean rewards; return metrics of violations and multipliers.

        A reward without a score in the epoch keeps its multiplier.
        """
        violations = {name: limit.violation(metrics[f"reward/{name}/mean"]) for name, limit in self.limits.items()}
        moved = {name: multiplier if math.isnan(violations[name]) else
                 max(0.0, multiplier + self.limits[name].rate * violations[name])
                 for name, multiplier in self.multipliers.items()}
        if moved:
            self.memory["limits"] = moved
        return {f"limit/{name}/multiplier": value for name, value in moved.items()} | {
            f"limit/{name}/violation": value for name, value in violations.items()}
