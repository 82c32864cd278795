"""Weights before reward hacking: `eval.best: frontier`.

A trained reward rises with the distance to the base. A reward that is not trained on rises at first and falls from some
distance on, while the trained one still rises (Gao et al. 2022, 2210.10760, figure 1). Training moves away from the
base, so that the order of measurements stands for the distance. The first measurement is kept. A later one replaces it
if two tests over the same held-out prompts and seeds agree:

- The trained reward is above that of the kept weights. A step further from the base has to buy a gain that can be
  shown; among equals the nearest is kept (the one-standard-error rule; Breiman et al. 1984, section 3.4.3).
- No eval-only reward is below its best measurement so far, the base's included.

Both are paired one-sided t-tests at 5 %, the complement of `statistics.CONFIDENCE`, shared by the eval-only rewards
(Bonferroni). A best value stays what later ones are compared with, so that a slow fall adds up. The level is shared by
the measurements, too, where a fall is reported, and not where weights are chosen: a fall that is not seen costs hacked
weights, one that is none a later measurement. On simulated curves of Gao et al. the looser level keeps weights nearer
to the peak, and on flat ones it costs 1 % of the trained reward.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowgrpo import rewards
from flowgrpo.config.reward_rules import Band, Budget
from flowgrpo.contrib.features import PhaseKeys
from flowgrpo.contrib.guard import fell_paired
from flowgrpo.errors import UserError
from flowgrpo.evaluation import kept
from flowgrpo.evaluation.measured import Measured, halves
from flowgrpo.evaluation.statistics import CONFIDENCE
from flowgrpo.methods.setup import Setup
from flowgrpo.nouns import inflect
from flowgrpo.storage.checkpoint import Tensors
from flowgrpo.storage.json_files import finite
from flowgrpo.training.extension import Extension, Metrics, Run

LEVEL = 1 - CONFIDENCE
Scores = dict[str, list[float]]  # mean of each held-out prompt by reward, NaN where it does not apply


@dataclass
class Frontier:
    """Measurements of a run, as far as the rule reads them.

    weights: of the trained rewards; all others are eval-only. base: scores of the base. best: highest so far of each
    eval-only reward. kept: of the kept weights, empty before there are any. value: their trained reward.
    measurements: of the whole run.
    """

    weights: Mapping[str, float]
    base: Scores = field(default_factory=dict)
    best: Scores = field(default_factory=dict)
    kept: Scores = field(default_factory=dict)
    value: float = 0.0
    measurements: int = 1

    def begin(self, base: Scores) -> None:
        self.base, self.kept, self.value = base, {}, 0.0
        self.best = {name: values for name, values in base.items() if name not in self.weights}

    def see(self, now: Scores) -> tuple[bool, list[str]]:
        """Record a measurement; return True if its weights are to be kept, and the eval-only rewards that it lost
        although its trained reward is above that of the kept weights."""
        # Eval-only rewards below their best by more than chance, where weights are chosen and where falls are reported.
        fallen, reported = ([name for name, best in self.best.items()
                             if fell_paired(best, now[name], LEVEL / count / len(self.best))]
                            for count in (1, self.measurements))
        for name, best in self.best.items():
            if mean(now[name]) > mean(best) or np.isnan(best).all():
                self.best[name] = now[name]
        if not self.kept:
            nothing = {name: [0.0 if value == value else value for value in now[name]] for name in self.weights}
            gain, gained = mean(change(self.weights, nothing, now)), True
        else:
            moved = change(self.weights, self.kept, now)
            gain, gained = mean(moved), fell_paired(moved.tolist(), [0.0] * len(moved), LEVEL)
        keeps = not np.isnan(gain) and (not self.kept or (gained and not fallen))
        if keeps:
            self.kept, self.value = now, self.value + gain
        return keeps, reported if gained else []


def change(weights: Mapping[str, float], before: Scores, now: Scores) -> np.ndarray:
    """Change of the weighted sum of trained rewards of each prompt [N]; NaN where none applies, or one in one of both
    measurements alone."""
    pairs = np.array([[before[name], now[name]] for name in weights], dtype=np.float64)  # [R, 2, N]
    absent = np.isnan(pairs).all(1)
    moved = np.where(absent, 0, pairs[:, 1] - pairs[:, 0])
    return np.where(absent.all(0), np.nan, np.array([*weights.values()]) @ moved)


def mean(values: Iterable[float]) -> float:
    """Mean of the values that are not NaN; NaN without any."""
    known = [value for value in values if value == value]
    return float(np.mean(known)) if known else float("nan")


NAME = "frontier"
SCORES = ("base", "best", "kept")  # of a `Frontier`


class KeepFrontier(Extension):
    """Value of each evaluation on the way by which `training.best` keeps its weights.

    rule: measurements so far. eval_only: names of the rewards that it guards. beyond: those of them that fell, by the
    epochs whose trained reward is above that of the kept weights.
    """

    name = NAME
    judges = (NAME,)
    asked_by = "eval.best is frontier"

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        self.run = trainer
        self.rule = Frontier(_nonzero(trainer.config.rewards),
                             measurements=max(trainer.config.train.epochs // trainer.config.eval.every, 1))
        self.eval_only: list[str] = []
        self.beyond: dict[int, list[str]] = {}

    @classmethod
    def conflicts(cls, setup: Setup) -> dict[str, bool]:
        rules = setup.config.trained.values()
        return {"phases, whose prompts and rewards change": bool(PhaseKeys.read(setup.config).phases),
                "a reward's limit, whose multiplier changes": any(each.limit for each in rules),
                "the transforms band and budget, which do not rise with a reward":
                    any(isinstance(change, (Band, Budget)) for each in rules for change in each.transform)}

    @classmethod
    def require(cls, setup: Setup) -> None:
        config, measured, asked = setup.config, setup.measured, cls.asked_by
        for name in _nonzero(config.rewards):
            if name not in measured:
                raise UserError(f"{asked}, but the trained reward {name!r} is not measured on held-out prompts: "
                                "expected a reward that scores one sample at a time")
        if not _eval_only(measured, config.rewards):
            raise UserError(f"{asked}, but no eval-only reward is measured, so that reward hacking cannot be seen: "
                            "name one under eval.rewards (one that compares with the base is a distance and does not "
                            "count)")
        if (count := min(config.eval.prompts, len(halves(setup.split[1])[0]))) < 2:
            raise UserError(f"{asked}, which compares held-out prompts: got {count}, expected at least 2 in the half "
                            "that chooses")

    def on_base(self, measured: Measured, functions: Mapping[str, Any]) -> None:
        self.eval_only = _eval_only(functions, self.run.config.rewards)
        base = self._scores(measured)
        if repr(base) != repr(self.rule.base):  # else a resumed run goes on
            if self.run.progress.best.weights:
                self.run.progress.best.forget()
            self._begin(base)

    def judge(self, measured: Measured) -> Metrics:
        """Trained reward of weights that are to be kept, NaN for others."""
        if not self.run.progress.best.weights:  # none yet, or forgotten, as they were measured in another way
            self._begin(self.rule.base)
        keeps, fallen = self.rule.see(self._scores(measured))
        if fallen:
            self.beyond[self.run.epoch] = fallen
        return {NAME: self.rule.value if keeps else math.nan}

    def on_measured(self, measured: Measured) -> Metrics:
        return {"frontier/epoch": self.run.progress.best.best.epoch}

    def _begin(self, base: Scores) -> None:
        self.rule.begin(base)
        self.beyond = {}

    def _scores(self, measured: Measured) -> Scores:
        samples = self.run.config.eval.samples
        return {name: kept.totals(measured.scores, {name: 1.0}, samples).tolist()
                for name in [*self.rule.weights, *self.eval_only]}

    def summary(self) -> str | None:
        if not self.beyond:
            return None
        fallen = sorted({name for names in self.beyond.values() for name in names})
        return f"beyond the frontier: {inflect(len(self.beyond), 'epoch')} {', '.join(map(str, self.beyond))}, by a " \
               f"higher trained reward and a lower {' and '.join(fallen)}"

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        scores = {key: finite(getattr(self.rule, key)) for key in SCORES}
        return {}, scores | {"value": self.rule.value, "beyond": [*self.beyond.items()]}

    def load_state(self, tensors: Tensors, values: dict[str, Any]) -> None:
        for key in SCORES:
            setattr(self.rule, key, {name: [math.nan if value is None else value for value in scores]
                                     for name, scores in values.get(key, {}).items()})
        self.rule.value = values.get("value", 0.0)
        self.beyond = {epoch: names for epoch, names in values.get("beyond", ())}


def _nonzero(weights: Mapping[str, float]) -> dict[str, float]:
    return {name: weight for name, weight in weights.items() if weight}


def _eval_only(measured: Mapping[str, Any], weights: Mapping[str, float]) -> list[str]:
    return [name for name, reward in measured.items() if not weights.get(name) and not rewards.sees_base(reward)]
