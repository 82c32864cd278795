"""Summary of a report in plain words: the change on the held-out prompts, and its reliability."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from flowgrpo.config.schema import Config

FEW = 2  # standard errors; a smaller change may be chance


@dataclass(frozen=True)
class Change:
    """Reward on the same held-out prompts and seeds, before training and now.

    weight: in training; None if only watched.
    error: standard error of the change, over prompts; None for fewer than two.
    count: samples that have a score at both times.
    """

    name: str
    weight: float | None
    before: float | None
    now: float | None
    change: float | None
    error: float | None
    count: int

    @property
    def way(self) -> int:
        """1: rose as wanted, -1: fell, 0: neither, or it may be chance."""
        if self.change is None or abs(self.change) <= FEW * (self.error or 0.0):
            return 0
        return 1 if self.change * (-1 if (self.weight or 0.0) < 0 else 1) > 0 else -1

    @property
    def digits(self) -> int:
        """Decimals that show two significant digits of the change, 3 to 6."""
        return min(max(1 - math.floor(math.log10(abs(self.change))), 3), 6) if self.change else 3


@dataclass(frozen=True)
class Nouns:
    """Names of a sample, and of what evaluations are."""

    sample: str = "picture"
    unit: str = "denoiser evaluations"


def mean(values: list[float | None]) -> float | None:
    """Return the mean of the scores that apply; None if none does."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def changes(config: Config, stages: list[dict[str, Any]]) -> list[Change]:
    """Return the rewards' changes from the first stage to the last; empty before a second measurement."""
    if len(stages) < 2:
        return []
    was, now = stages[0]["scores"], stages[-1]["scores"]
    samples = config.eval.samples
    return [_change(name, config.rewards.get(name), was[name], now.get(name, []), samples) for name in was]


def _change(name: str, weight: float | None, was: list[float | None], now: list[float | None], samples: int) -> Change:
    """Return a reward's change from scores with so many samples per prompt. These are not independent, so prompts are
    counted."""
    pairs = [None if old is None or new is None else (old, new) for old, new in zip(was, now)]
    whole = [pair for pair in pairs if pair]
    prompts = [[new - old for old, new in filter(None, pairs[at:at + samples])] for at in range(0, len(pairs), samples)]
    moved = [sum(differences) / len(differences) for differences in prompts if differences]
    error = statistics.stdev(moved) / math.sqrt(len(moved)) if len(moved) > 1 else None
    before, after = (mean([pair[at] for pair in whole]) for at in (0, 1))
    change = None if before is None or after is None else after - before
    return Change(name, weight, before, after, change, error, len(whole))


def sentences(config: Config, lines: list[dict[str, Any]], reward_changes: list[Change], last: dict[str, Any],
              finished: bool, kept: str | None = None, nouns: Nouns = Nouns()) -> list[dict[str, str]]:
    """Return the summary: {text, tone}, with tone plain, good or warn. kept: `kept` of summary.json."""
    goal = _listed([name if weight == 1 else f"{name} (weight {weight:g})" for name, weight in
                    config.rewards.items()])
    line = lines[-1] if lines else {"epoch": 0, "evaluations": 0, "seconds": 0.0}
    toned = [("plain", f"{config.model} {'was' if finished else 'is being'} aligned to {goal} with {config.method}: "
                       f"{line['epoch']} of {config.train.epochs} epochs, {line['evaluations']:,} {nouns.unit}, "
                       f"{_duration(line['seconds'])} of training.")]
    toned += [("plain", f"{kept[0].upper()}{kept[1:]}.")] if kept else []
    if any(change.change is not None for change in reward_changes) and lines:
        toned += [_moved(change, nouns.sample) for change in reward_changes if change.change is not None]
        toned += _hacking(reward_changes, nouns.sample)
    toned += _first_ratio(last.get("first_ratio", {}))
    return [{"tone": tone, "text": text} for tone, text in toned]


def _moved(change: Change, sample: str) -> tuple[str, str]:
    """Describe one reward's change in a sentence."""
    assert change.change is not None
    kind = "trained on" if change.weight is not None else "only watched"
    verb = {1: "rose", -1: "fell"}.get((change.change > 0) - (change.change < 0) if change.way else 0)
    before, now = (f"{value:.{change.digits}f}" for value in (change.before, change.now))
    ends = f"from {before} to {now} on {change.count} held-out {sample}s"
    if verb is None:
        return "plain", f"{change.name}, {kind}, went {ends}, which may be chance."
    return {1: "good", -1: "warn"}[change.way], f"{change.name}, {kind}, {verb} {ends}."


def _hacking(reward_changes: list[Change], sample: str) -> list[tuple[str, str]]:
    """Warn of possible reward hacking: a trained reward rose while a watched one fell."""
    risen = [change.name for change in reward_changes if change.weight is not None and change.way > 0]
    fallen = [change.name for change in reward_changes if change.weight is None and change.way < 0]
    if risen and fallen:
        return [("warn", f"Possible reward hacking: {_listed(risen)} got better, while {_listed(fallen)}, which was "
                         f"only watched, fell. Look at the {sample}s.")]
    if all(change.weight is not None for change in reward_changes):
        return [("plain", "No reward was only watched, so reward hacking would not show in these numbers: name one or "
                          f"two under eval.rewards, and look at the {sample}s.")]
    return []


def _first_ratio(check: dict[str, Any]) -> list[tuple[str, str]]:
    """Describe the result of the check before the first update."""
    if check.get("found") is None:
        return []
    text = ("Before the first update, the largest |log ratio| of replay to rollout was "
            + (f"{check['found']:.1e}" if check["found"] else "0"))
    if check["rescored"]:
        return [("plain", f"{text}, above {check['limit']:.1e}: old log-probabilities are computed again as the replay "
                          "does.")]
    return [("good", f"{text} (at most {check['limit']:.1e} is right): the two agree.")]


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
