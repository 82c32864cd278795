"""Weights before reward hacking: `eval.best: frontier`, by the rule of `rule`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowgrpo import rewards
from flowgrpo.config.reward_rules import Band, Budget
from flowgrpo.contrib.frontier import rule
from flowgrpo.contrib.guard.extension import of_prompts
from flowgrpo.errors import UserError
from flowgrpo.methods.setup import Setup
from flowgrpo.storage.checkpoint import Tensors
from flowgrpo.storage.json_files import finite
from flowgrpo.training.extension import Extension, Metrics
from flowgrpo.training.run import Run

if TYPE_CHECKING:
    from flowgrpo.evaluation.measured import Measured

NAME = "frontier"
SCORES = ("base", "best", "kept")  # of a `rule.Frontier`


class KeepFrontier(Extension):
    """Value of each evaluation on the way by which `training.best` keeps its weights.

    rule: measurements so far. eval_only: names of the rewards that the rule guards. beyond: those of them that fell, by
    the epochs whose trained reward is above that of the kept weights.
    """

    name = NAME
    judges = (NAME,)

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        self.run = trainer
        self.rule = rule.Frontier(_trained(trainer.config.rewards))
        self.eval_only: list[str] = []
        self.beyond: dict[int, list[str]] = {}

    @classmethod
    def asked(cls, setup: Setup) -> str:
        return "eval.best is frontier"

    @classmethod
    def refused(cls, setup: Setup) -> dict[str, bool]:
        rules = setup.config.trained.values()
        return {"phases, whose prompts and rewards change": bool(setup.config.phases),
                "a reward's limit, whose multiplier changes": any(each.limit for each in rules),
                "the transforms band and budget, which do not rise with a reward":
                    any(isinstance(change, (Band, Budget)) for each in rules for change in each.transform)}

    @classmethod
    def require(cls, setup: Setup) -> None:
        """Raise UserError for a run that does not measure what the rule reads."""
        config, measured, asked = setup.config, setup.measured, cls.asked(setup)
        for name in _trained(config.rewards):
            if name not in measured:
                raise UserError(f"{asked}, but the trained reward {name!r} is not measured on held-out prompts: "
                                "expected a reward that scores one sample at a time")
        if not _eval_only(measured, config.rewards):
            raise UserError(f"{asked}, but no eval-only reward is measured, so that reward hacking cannot be seen: "
                            "name one under eval.rewards (one that compares with the base is a distance and does not "
                            "count)")
        if (count := min(config.eval.prompts, len(setup.split[1]))) < 2:
            raise UserError(f"{asked}, which compares held-out prompts: got {count}, expected at least 2")

    def on_base(self, measured: Measured, functions: Mapping[str, Any]) -> None:
        """Begin with the base's scores, unless a resumed run began with the same."""
        self.eval_only = _eval_only(functions, self.run.config.rewards)
        base = self._scores(measured)
        if repr(base) != repr(self.rule.base):
            if self.run.progress.best.weights:
                self.run.progress.best.forget()
            self._begin(base)

    def judge(self, measured: Measured) -> Metrics:
        """Return the trained reward of weights that are to be kept, NaN for others."""
        if not self.run.progress.best.weights:  # none yet, or forgotten, as they were measured in another way
            self._begin(self.rule.base)
        keeps, fallen = self.rule.see(self._scores(measured))
        if fallen:
            self.beyond[self.run.epoch] = fallen
        return {NAME: self.rule.value if keeps else math.nan}

    def on_measured(self, measured: Measured) -> Metrics:
        """Return the epoch of the kept weights."""
        return {"frontier/epoch": self.run.progress.best.best.epoch}

    def _begin(self, base: rule.Scores) -> None:
        self.rule.begin(base)
        self.beyond = {}

    def _scores(self, measured: Measured) -> rule.Scores:
        """Return the mean of each held-out prompt, of the rewards that the rule reads."""
        samples = self.run.config.eval.samples
        return {name: of_prompts(measured.scores[name], samples) for name in [*self.rule.weights, *self.eval_only]}

    def summary(self) -> str | None:
        """Return the epochs beyond the frontier, for the run's summary."""
        if not self.beyond:
            return None
        named = f"epoch{'s' * (len(self.beyond) > 1)} {', '.join(map(str, self.beyond))}"
        fallen = sorted({name for names in self.beyond.values() for name in names})
        return (f"beyond the frontier: {named}, by a higher trained reward and a lower "
                f"{' and '.join(fallen)}")

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the measurements so far, for a checkpoint."""
        kept = {key: finite(getattr(self.rule, key)) for key in SCORES}
        return {}, kept | {"value": self.rule.value, "beyond": [*self.beyond.items()]}

    def load_state(self, tensors: Tensors, values: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; without any, begin anew at `on_base`."""
        for key in SCORES:
            setattr(self.rule, key, {name: [math.nan if value is None else value for value in scores]
                                     for name, scores in values.get(key, {}).items()})
        self.rule.value = values.get("value", 0.0)
        self.beyond = {epoch: names for epoch, names in values.get("beyond", ())}


def _trained(weights: Mapping[str, float]) -> dict[str, float]:
    return {name: weight for name, weight in weights.items() if weight}


def _eval_only(measured: Mapping[str, Any], weights: Mapping[str, float]) -> list[str]:
    """Return the measured rewards that are neither trained on nor distances to the base."""
    return [name for name, reward in measured.items() if not weights.get(name) and not rewards.sees_base(reward)]
