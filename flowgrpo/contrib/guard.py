"""Guard against collapse: `guard.window`, and limits of looks. A run whose measurements leave its own band, or whose
held-out images are blurred or alike, goes back to good weights.

After an update whose weights are not finite, or whose gradient norm, KL or |log ratio| is a spike, it goes back to the
weights before that epoch. After a fall of the training reward or of the held-out reward, it goes back to the weights
with the best measurement. `fell` and `limit` say when. After edges wider than `guard.edge_width` times the base's, or
images of a prompt less than `guard.diversity` times as far apart, it goes back to the last weights within these
limits: without a window those measured last, else those of the best measurement. The epochs go on, with new samples and
a lower learning rate.

Bounds are derived from the probability of a return without a cause. A run makes three kinds of tests: of the training
reward, of the held-out reward, and of spikes. Each kind gets a third of that probability, and each of its tests an
equal share (Bonferroni). The best of earlier measurements is selected, so that every pair of two of them counts as a
test. The only assumption is that means are nearly normal.
"""

import hashlib
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats

from flowgrpo.config.schema import Config
from flowgrpo.contrib.features import ExtrapolationKeys, GuardKeys, PhaseKeys
from flowgrpo.curriculum.order import EpochPermutation
from flowgrpo.errors import UserError
from flowgrpo.evaluation import kept
from flowgrpo.evaluation.looks import APART, EDGES, Looks
from flowgrpo.evaluation.measured import Measured
from flowgrpo.methods import capabilities
from flowgrpo.methods.setup import Setup
from flowgrpo.policies.weights import adapters
from flowgrpo.storage import checkpoint
from flowgrpo.storage.checkpoint import Stateful, Tensors, within
from flowgrpo.training import state
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics, Run
from flowgrpo.types import unwrap

KINDS = 3
SIGNALS = ("grad_norm", "log_ratio_max", "kl")  # metrics of an update, which are read as logarithms
LEAST = 3  # values before a spike can be told


def pair_level(false_alarms: float, count: int) -> float:
    """Level of one test, of all pairs of `count` measurements."""
    return false_alarms / KINDS / max(count * (count - 1) / 2, 1)


def spike_level(false_alarms: float, epochs: int) -> float:
    """Level of one test of one signal in one epoch."""
    return false_alarms / KINDS / (epochs * len(SIGNALS))


def fell(best: Sequence[float], now: Sequence[float], level: float) -> bool:
    """True if the mean of independent values is below that of the best ones, by Welch's one-sided t-test."""
    if min(len(best), len(now)) < 2:
        return False
    (one, other), apart = (np.var(of, ddof=1) / len(of) for of in (best, now)), np.mean(best) - np.mean(now)
    if one + other == 0:
        return bool(apart > 0)
    freedom = (one + other)**2 / (one**2 / (len(best) - 1) + other**2 / (len(now) - 1))
    return bool(apart / math.sqrt(one + other) > stats.t.isf(level, freedom))


def fell_paired(best: Sequence[float], now: Sequence[float], level: float) -> bool:
    """True if values of the same prompts and seeds are below the best ones, by the paired t-test without NaN."""
    apart = np.asarray(best, dtype=np.float64) - np.asarray(now, dtype=np.float64)
    apart = apart[~np.isnan(apart)]
    if len(apart) < 2:
        return False
    error = apart.std(ddof=1) / math.sqrt(len(apart))
    return bool(apart.mean() > 0 and apart.mean() > error * stats.t.isf(level, len(apart) - 1))


def limit(before: Sequence[float], level: float) -> float:
    """Largest value that the ones before allow: the upper bound of the prediction interval of their logarithms. It is
    infinite for fewer than LEAST values, and for equal ones, which have no spread."""
    logs = np.log(before)
    if len(logs) < LEAST or not (spread := logs.std(ddof=1)):
        return math.inf
    reach = stats.t.isf(level, len(logs) - 1) * spread * math.sqrt(1 + 1 / len(logs))
    return float(np.exp(min(logs.mean() + reach, 700.0)))


def reward_of(config: Config) -> str:
    """Reward whose fall on held-out prompts the guard sees."""
    best = config.eval.best if config.eval.best in config.trained | config.extra_rewards else None
    return GuardKeys.read(config).reward or best or max(config.rewards, key=config.rewards.__getitem__)


def limits(settings: GuardKeys) -> dict[str, float]:
    return settings.model_dump(include={EDGES, APART}, exclude_none=True)


@dataclass(frozen=True)
class Good:
    """Weights after `epoch` epochs, with all that belongs to them, by the names of a checkpoint."""

    epoch: int
    tensors: Tensors


def followers(run: Run) -> dict[str, Stateful]:
    """The parts of a run that hold earlier weights."""
    return {"old": run.rollouts.old_policy, "reference": run.kl_reference}


def snapshot(run: Run) -> Good:
    """Copy of what the run trains."""
    tensors = state.trained(run, {name: part.state()[0] for name, part in followers(run).items()})
    return Good(run.epoch, {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()})


@torch.no_grad()
def restore(run: Run, good: Good) -> None:
    """Give the run what was copied, bit by bit."""
    optimization, weights = run.optimization, run.policy.weights
    weights.load(within(good.tensors, "weights/"))
    own = {key: value.clone() for key, value in within(good.tensors, "optimizer/").items()}  # the optimizer keeps them
    checkpoint.load_optimizer(optimization.optimizer, own)
    if optimization.ema is not None:
        for key, value in within(good.tensors, "ema/").items():
            optimization.ema[key].copy_(value)
    for name, part in followers(run).items():
        held = {key: value.clone() for key, value in within(good.tensors, f"{name}/").items()}
        part.load_state(held, {"epoch": run.epoch} | part.state()[1])


class Guard(Extension):
    """Last good weights of a run, and the band of its measurements.

    good: weights with the best measurement; before: those at the start of the present epoch. None before there are any.
    recent: mean rewards of the groups of the last epochs, one list each; window: those of the best window, which ended
    `since` epochs ago. held_out: means of the held-out prompts at their best measurement; how: what identifies these.
    signals: values of the last updates in the band. returns: a sentence each. base: looks of the base's images.
    """

    name = "guard"
    needs = frozenset({capabilities.OWN_SAMPLES, capabilities.WHOLE_WEIGHTS})
    good: Good | None
    recent: deque[list[float]]
    window: list[float]
    since: int
    held_out: list[float]
    how: str
    signals: dict[str, deque[float]]
    returns: list[str]

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        self.settings, self.epochs, self.run = GuardKeys.read(trainer.config), trainer.config.train.epochs, trainer
        self.before: Good | None = None
        self.base = Looks()
        self.load_state({}, {})

    @classmethod
    def best_by(cls, config: Config) -> str | None:
        settings = GuardKeys.read(config)
        return reward_of(config) if settings.window and settings.best and config.eval.every else None

    @classmethod
    def chooses(cls, config: Config) -> bool:
        """True for a window, which reads rewards; limits of looks make no reward look better than it is."""
        return bool(GuardKeys.read(config).window)

    @classmethod
    def enabled_by(cls, setup: Setup) -> str:
        settings = GuardKeys.read(setup.config)
        known = ({"window": settings.window} if settings.window else {}) | limits(settings)
        return ", ".join(f"guard.{name} is {value:g}" for name, value in known.items())

    @classmethod
    def requirements(cls, setup: Setup) -> frozenset[str]:
        """Needs of the rule: a window compares the rewards of the weights that an epoch begins with; looks do not."""
        return cls.needs | ({capabilities.PRESENT_WEIGHTS} if GuardKeys.read(setup.config).window else set())

    @classmethod
    def conflicts(cls, setup: Setup) -> dict[str, bool]:
        config, unsteady = setup.config, _unsteady(setup.config, setup.method)
        return {"phases, whose prompts and rewards change": bool(PhaseKeys.read(config).phases),
                "train.extrapolate, which moves the weights too": ExtrapolationKeys.read(config).extrapolate > 0,
                f"{unsteady} without eval.every": bool(unsteady) and not config.eval.every}

    @classmethod
    def require(cls, setup: Setup) -> None:
        """Raise UserError for a held-out reward that is not measured, or is better the lower it is."""
        config = setup.config
        if not config.eval.every or not GuardKeys.read(config).window:
            return
        name = reward_of(config)
        if name not in setup.measured:
            raise UserError(f"guard.reward names the reward {name!r}, which is not measured: expected "
                            f"{', '.join(setup.measured)}, or name it under eval.rewards too")
        if config.rewards.get(name, 1.0) <= 0:
            raise UserError(f"guard.reward is {name!r}, whose weight is {config.rewards[name]:g}: "
                            "expected a measured reward that is better the higher it is")

    def on_base(self, measured: Measured, functions: Mapping[str, Any]) -> None:
        self.base = measured.looks

    # --- moments -----------------------------------------------------------------------------------------------------

    def on_drawn(self, epoch: Epoch) -> None:
        """Record the mean rewards of the epoch's first groups, which the weights before it drew."""
        totals = epoch.groups.totals[[*epoch.groups.turns[0]]].nanmean(1)
        self.recent.append(totals[~totals.isnan()].tolist())
        self.since += 1

    def on_credited(self, epoch: Epoch) -> None:
        self.before = snapshot(self.run)
        self.good = self.good or self.before

    def on_trained(self, epoch: Epoch) -> Metrics:
        """Go back if the training reward fell or the update is a spike; return the number of returns so far."""
        before, steady = unwrap(self.before), not _unsteady(self.run.config, self.run.method)
        since = [value for values in [*self.recent][-self.since:] for value in values]  # the best window ended
        if self.window and steady and fell(self.window, since, pair_level(self.settings.false_alarms, self.epochs)):
            self._return_to_good(f"the training reward fell from {np.mean(self.window):.4g} to {np.mean(since):.4g}")
        else:
            # The last window, if it is the best so far; its weights are the good ones if none was measured.
            now = [value for values in self.recent for value in values]
            if len(self.recent) >= self.settings.window and now and not (
                    self.window and np.mean(now) < np.mean(self.window)):
                self.window, self.since = now, 0
                self.good = self.good if self.held_out else before
            weights = {**self.run.policy.weights.named, **(self.run.optimization.ema or {})}
            odd = self.run.processes.any(bool(adapters.odd(weights)))
            if spike := "weights are not finite" if odd else self._spike(epoch.metrics):
                self._go_back(before, spike)
        self.before = None
        return {"guard/returns": len(self.returns)}

    def judge(self, measured: Measured) -> Metrics:
        """NaN as the reward that chooses the kept weights, for weights beyond the limits of looks."""
        by = self.run.progress.best.best.reward
        return {by: math.nan} if by and self._beyond(measured.looks) else {}

    def on_measured(self, measured: Measured) -> Metrics:
        """Keep the best weights, or go back if the held-out reward fell or looks are beyond limits."""
        if beyond := self._beyond(measured.looks):
            self._return_to_good(beyond)
        elif self.settings.window:
            self._compare(measured)
        else:
            self.good = snapshot(self.run)
        return {"guard/returns": len(self.returns)}

    def _beyond(self, now: Looks) -> str:
        """Describe looks beyond a limit that differ from the base's by more than chance; empty without."""
        shares = {name: share for name, share in now.relative_to(self.base).items() if share.certain}
        most = limits(self.settings)
        if shares.get(EDGES, 0.0) > most.get(EDGES, math.inf):
            return f"edges became {shares[EDGES]:.2f} times as wide as the base's (guard.{EDGES} {most[EDGES]:g})"
        if shares.get(APART, math.inf) < most.get(APART, 0.0):
            return (f"images of a prompt became {shares[APART]:.2f} times as far apart as the base's (guard.{APART} "
                    f"{most[APART]:g})")
        return ""

    def _compare(self, measured: Measured) -> None:
        """Keep weights that are the best on held-out prompts, or go back if these fell."""
        name, settings = reward_of(self.run.config), self.run.config.eval
        how = hashlib.sha256(repr((settings.model_dump_json(exclude={"every", "best", "stop", "weights", "grid"}),
                                   [prompt.text for prompt in measured.prompts])).encode()).hexdigest()
        if how != self.how:  # a resumed run may measure in another way
            self.how, self.held_out = how, []
        now = kept.totals(measured.scores, {name: 1.0}, settings.samples).tolist()
        level = pair_level(self.settings.false_alarms, self.epochs // settings.every)
        if not np.isnan(now).all():
            if not self.held_out or np.nanmean(now) > np.nanmean(self.held_out):
                self.held_out, self.good = now, snapshot(self.run)
            elif fell_paired(self.held_out, now, level):
                self._return_to_good(f"held-out {name} fell from {np.nanmean(self.held_out):.4g} to "
                                     f"{np.nanmean(now):.4g}")

    # --- band --------------------------------------------------------------------------------------------------------

    def _spike(self, metrics: Metrics) -> str:
        """Describe a signal of the last update that is out of its band, or add all to the band."""
        level = spike_level(self.settings.false_alarms, self.epochs)
        values = {key: metrics[key] for key in SIGNALS if metrics.get(key)}
        for key, value in values.items():
            if math.isfinite(value) and value > (bound := limit(self.signals[key], level)):
                return f"{key} is {value:.3g}, above its bound {bound:.3g}"
            if not math.isfinite(value) and key != "grad_norm":  # such a gradient is skipped
                return f"{key} is not finite"
        for key, value in values.items():
            if math.isfinite(value) and value > 0:
                self.signals[key].append(value)
        return ""

    def _return_to_good(self, why: str) -> None:
        self._go_back(unwrap(self.good), why)
        self.recent.clear()
        self.since = 0
        self.window = [] if self.held_out else self.window

    def _go_back(self, to: Good, why: str) -> None:
        restore(self.run, to)
        self.run.optimization.scale *= self.settings.lr
        self.returns.append(f"epoch {self.run.epoch + (self.before is not None)}: {why}, so that the run went back to "
                            f"the weights of epoch {to.epoch}")
        self.run.log(f"{self.returns[-1]}, with {self.settings.lr:g} of the learning rate")

    def summary(self) -> str | None:
        return "; ".join(self.returns) or None

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        good = self.good or snapshot(self.run)
        return dict(good.tensors), {
            "good": good.epoch, "recent": [*self.recent], "window": self.window, "since": self.since, "how": self.how,
            "held_out": [None if value != value else value for value in self.held_out], "returns": [*self.returns],
            "signals": {key: [*values] for key, values in self.signals.items()}, "scale": self.run.optimization.scale}

    def load_state(self, tensors: Tensors, values: dict[str, Any]) -> None:
        self.good = Good(values["good"], dict(tensors)) if "good" in values else None
        self.recent = deque(values.get("recent", ()), self.settings.window)
        self.window, self.since = values.get("window", []), values.get("since", 0)
        self.held_out = [math.nan if value is None else value for value in values.get("held_out", ())]
        self.how, self.returns = values.get("how", ""), [*values.get("returns", ())]
        self.signals = {key: deque(values.get("signals", {}).get(key, ()), self.settings.window) for key in SIGNALS}
        if self.returns:
            self.run.optimization.scale = values["scale"]


def _unsteady(config: Any, method: Any) -> str:
    """Describe what changes the training reward of equal weights in the course of a run; empty for nothing."""
    if type(method.curriculum) is not EpochPermutation:
        return f"the curriculum {type(method.curriculum).__name__}, which chooses prompts by their rewards,"
    return "a reward's limit, whose multiplier changes," if any(rule.limit for rule in config.trained.values()) else ""
