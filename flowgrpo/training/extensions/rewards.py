"""Extensions on a run's rewards: multipliers of their constraints, and hints on what keeps a run from learning."""

from torch import Tensor

from flowgrpo.advantages.group import Advantage, AdvantageRule, group_std, weighted_sum
from flowgrpo.evaluation.report.symptoms import CEILING, solved
from flowgrpo.rewards import about
from flowgrpo.training import extensions
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Run

STARVED = 5  # deviation of a batch's rewards over that within its groups
TIMES = 100  # one reward's weighted deviation over another's, from which only the first counts


class RewardHints(Extension):
    """Hints on the rewards of a run, each printed once. A reward that brings its own draws gives its own."""

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        self.advantage, self._printed = trainer.method.credit.advantage, set[str]()
        functions, rules = trainer.scoring.functions, trainer.config.trained
        self.ranges = {name: about(function).range for name, function in functions.items()}
        self.directions = {name: rules[name].direction if name in rules else 1.0 for name in functions}
        self._silent = bool(extensions.extensions_of_rewards(trainer.scoring.functions))

    def on_drawn(self, epoch: Epoch) -> None:
        if self._silent:
            return
        self.epoch(epoch.metrics)
        if isinstance(self.advantage, Advantage) and self.advantage.scale == "batch":
            weights = list(self.trainer.scoring.weights.values())
            shaped = self.trainer.scoring.transform(epoch.groups.first[..., :len(weights)])
            for column in shaped.unbind(2) if self.advantage.order != "rewards" else [weighted_sum(shaped, weights)]:
                self.warn_large_std(column)

    def warn_large_std(self, rewards: Tensor) -> None:
        """Print that the batch's deviation, by which rewards [P,G] are divided, is far above that within groups."""
        within = group_std(rewards[~rewards.isnan().all(1)])
        within, whole = within[within > 0], rewards[~rewards.isnan()]
        if len(within) and (ratio := (whole.std() / within.mean()).item()) >= STARVED:
            self._once("starved", f"the batch's deviation of the rewards is {ratio:.0f} times that within groups that "
                       "differ, and the method divides by the batch's, so that advantages are as much smaller: leave "
                       "out prompts without differences, --method=...+dynamic_sampling, or divide by each group's, "
                       "parts.advantage: {type: Advantage, scale: group}")

    def epoch(self, metrics: dict[str, float]) -> None:
        """Print what an epoch's rewards show."""
        spreads = self.trainer.scoring.spreads
        names = [name for name in spreads if self.directions[name]]  # of another weight than 0
        silent = [name for name in names if metrics[f"reward/{name}/zero_variance_groups"] == 1]
        best = [name for name in names if solved(self.directions[name], [metrics[f"reward/{name}/mean"]],
                                                 self.ranges[name], 1 if name in silent else CEILING)]
        if silent == names:
            if self.trainer.method.credit.teaches:
                return
            self._once("solved" if best == names else "all",
                       f"all samples have the best score of {' and of '.join(names)}, so that nothing is left to learn "
                       "from these prompts: take harder ones" if best == names else
                       "in every group all samples earn the same, so nothing is learned: take a reward with values in "
                       "between, prompts of another difficulty, or a larger train.group")
            return
        for name in silent:
            self._once(name, f"reward {name!r} is " + (
                "at its best score for all samples, so that it teaches nothing more" if name in best else
                f"the same for all samples of every group (mean {metrics[f'reward/{name}/mean']:.4g}), so that it "
                "teaches nothing"))
        ranked = sorted((name for name in names if spreads[name] > 0 and name not in best),
                        key=lambda name: spreads[name])
        if len(ranked) > 1 and adds(self.advantage) and spreads[ranked[-1]] >= TIMES * spreads[ranked[0]]:
            small, large = ranked[0], ranked[-1]
            self._once("scale", f"reward {large!r} varies by {spreads[large]:.3g} within groups and {small!r} by "
                       f"{spreads[small]:.3g}, weights included, so that {small!r} hardly counts: change their "
                       "weights, or compare each by itself, parts.advantage: {type: Advantage, scale: group, order: "
                       "advantages}")

    def _once(self, key: str, line: str) -> None:
        if key not in self._printed:
            self._printed.add(key)
            self.trainer.log(f"epoch {self.trainer.epoch + 1}: {line}")


def adds(advantage: AdvantageRule) -> bool:
    """True for a rule that adds weighted rewards of any scale, and does not scale each of them first."""
    if isinstance(advantage, Advantage):
        return advantage.order == "rewards" or advantage.scale in ("none", "leave_one_out")
    return not advantage.adapts_weights


class Constraints(Extension):
    """Multipliers of limited rewards. They are in the run's memory, so that a checkpoint has them."""

    def on_drawn(self, epoch: Epoch) -> None:
        epoch.metrics |= self.trainer.scoring.limits.learn(epoch.metrics)
