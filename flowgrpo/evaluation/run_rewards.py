"""Rewards of a run that is opened: without those that execute code or reach an address, unless the run is trusted."""

from collections.abc import Sequence
from typing import Any, TypeVar

from flowgrpo import rewards, trust
from flowgrpo.config.reward_rules import RewardRule, WatchRule
from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError
from flowgrpo.rewards import pairwise

Rule = TypeVar("Rule", bound=WatchRule)
WHY = "executes code or sends samples to an address that the run's folder names"


def rewards_of_run(config: Config) -> dict[str, Any]:
    """A run's rewards, made, for samples that are scored alone; none if all are left out."""
    trained, extra = rules(config)
    if not trained and not extra:
        return {}
    return pairwise.held_out_rewards(rewards.compose(trained, config.cache), rewards.compose(extra, config.cache))


def rules(config: Config, needed: bool = False) -> tuple[dict[str, RewardRule], dict[str, WatchRule]]:
    """Rules of a run's trained and eval-only rewards; those left out are printed. needed: UserError if all are."""
    kept = _local_rules(config.trained), _local_rules(config.extra_rewards)
    known = config.trained | config.extra_rewards
    out = [label for label in known if not any(label in some for some in kept)]
    if needed and len(out) == len(known):
        raise UserError(f"reward {out[0]!r} {WHY}: name rewards by --rewards, or add {trust.FLAG} if you trust the run")
    for label in out:
        trust.log(f"left out: reward {label!r}, which {WHY}; {trust.FLAG} includes it")
    return kept


def rule(config: Config | None, name: str) -> WatchRule:
    """A run's rule of that reward, or the default. Raises UserError if it executes code or reaches an address."""
    known = (config.trained | config.extra_rewards).get(name, WatchRule()) if config else WatchRule()
    if trust.reaches_out(known.use or name, known.args):
        raise UserError(f"reward {name!r} {WHY}: give its rule in --rewards FILE.yaml, or add {trust.FLAG} if you "
                        "trust the run")
    return known


def rewards_by_name(config: Config | None, names: Sequence[str] | dict[str, WatchRule]) -> dict[str, Any]:
    """Rewards by their names or rules, made; the run's where none is named. Raises UserError if there are none."""
    chosen = names if isinstance(names, dict) else {name: rule(config, name) for name in names}
    if config and not chosen:
        of_trained, of_extra = rules(config, needed=True)
        chosen = of_trained | of_extra
    if not chosen:
        raise UserError("--rewards: expected the names of rewards, such as --rewards scene (`flowgrpo list rewards` "
                        "lists them)")
    composed = rewards.compose(chosen, config.cache if config else None)
    # The run's rewards that need groups are dropped; one requested by name raises.
    trained = {name: composed.pop(name) for name in chosen if config and not names and name in config.trained}
    return pairwise.held_out_rewards(trained, composed)


def _local_rules(given: dict[str, Rule]) -> dict[str, Rule]:
    return {label: each for label, each in given.items() if not trust.reaches_out(each.use or label, each.args)}
