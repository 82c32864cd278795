"""Best weights of a run and early stopping, each by a reward that is measured on held-out prompts.

Only measurements of `eval.every` count: the base does not, nor do epochs between. Weights are those that `eval.weights`
names. A value that is NaN, or not larger, is no peak; of equal ones the first is.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from flowgrpo.config.sections import Eval
from flowgrpo.errors import UserError
from flowgrpo.methods.setup import Setup
from flowgrpo.nouns import quantity


@dataclass
class Peak:
    """Highest mean so far of a held-out reward, its epoch, and the number of evaluations since."""

    reward: str | None = None
    value: float | None = None
    epoch: int = 0
    since: int = 0

    def see(self, metrics: dict[str, Any], epoch: int) -> bool:
        """Record an evaluation; return True if it is the best so far."""
        value = metrics[f"held_out/{self.reward}"]
        better = value == value and (self.value is None or value > self.value)
        if better:
            self.value, self.epoch = value, epoch
        self.since = 0 if better else self.since + 1
        return better


class BestWeights:
    """State of `eval.best` and `eval.stop`; weights: those of the best epoch on the CPU, empty without one.

    by: the reward of the best weights where `eval.best` names none. anew: evaluations on the way choose the weights, so
    that others are reported (`held_out.sides`).
    """

    def __init__(self, settings: Eval, by: str | None = None, anew: bool = False):
        self.anew = anew
        self.patience = settings.stop.patience if settings.stop else None
        self.best, self.stop = Peak(settings.best or by), Peak(settings.stop.reward if settings.stop else None)
        self.weights: dict[str, Tensor] = {}

    def see(self, metrics: dict[str, Any], epoch: int, weights: Callable[[], dict[str, Tensor]]) -> None:
        """Record an evaluation, with the evaluated weights."""
        if self.best.reward and self.best.see(metrics, epoch):
            self.weights = {key: tensor.detach().cpu().clone() for key, tensor in weights().items()}
        if self.stop.reward:
            self.stop.see(metrics, epoch)

    def forget(self) -> None:
        """Reset, if earlier measurements were made in another way."""
        self.best, self.stop, self.weights = Peak(self.best.reward), Peak(self.stop.reward), {}

    @property
    def should_stop(self) -> bool:
        """True if `patience` evaluations in a row brought no better one."""
        return self.patience is not None and self.stop.since >= self.patience

    def summary(self) -> str | None:
        """The kept epoch and the reason of the end, for the run's summary; None if there is nothing to report."""
        said = []
        if self.weights:
            said.append(f"kept the weights of epoch {self.best.epoch}, the best by held-out {self.best.reward} "
                        f"({self.best.value:.4g})")
        if self.should_stop:
            said.append(f"stopped: {quantity(self.stop.since, 'evaluation')} without a better held-out "
                        f"{self.stop.reward} than that of epoch {self.stop.epoch}")
        return "; ".join(said) or None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self.weights, {"best": asdict(self.best), "stop": asdict(self.stop)}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore the state of a checkpoint, as far as it is of the same rewards."""
        if self.best.reward and values.get("best", {}).get("reward") == self.best.reward:
            self.best, self.weights = Peak(**values["best"]), dict(tensors)
        if self.stop.reward and values.get("stop", {}).get("reward") == self.stop.reward:
            self.stop = Peak(**values["stop"])


def check(setup: Setup) -> None:
    """Raise UserError for weights that the run does not keep, or rewards of `eval.best` and `eval.stop` that are never
    measured."""
    settings, measured = setup.config.eval, setup.measured
    if settings.weights == "ema" and not setup.config.train.ema:
        raise UserError("eval.weights is 'ema', but train.ema is 0: set train.ema to a decay such as 0.9")
    names = {"best": settings.best, "stop": settings.stop.reward if settings.stop else None}
    for key, name in names.items():
        if name is None:
            continue
        if not settings.every:
            raise UserError(f"eval.{key} is set, but eval.every is 0, so nothing is measured in between: set "
                            "eval.every to a number of epochs")
        if name not in measured and name not in setup.judged:
            raise UserError(f"eval.{key} names the reward {name!r}, which is not measured: expected "
                            f"{', '.join(measured)}, or name it under eval.rewards too")
