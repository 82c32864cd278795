"""Outcome of a run, from its lines of metrics: the epochs that trained nothing, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError
from flowgrpo.nouns import counted, joined

UNMOVED = 1e-7  # change of the weights, as `TrainableWeights.change`, that no sample shows
SHOWN = 3  # epochs that are named one by one


@dataclass(frozen=True)
class Outcome:
    """Account of what a run trained.

    epochs: that are done. idle: those that trained nothing; why: the cause of these.
    silent: epochs in which a trained reward was asked and gave no score, by reward.
    taught: False if no reward told one sample from another in any epoch, though the weights changed.
    """

    epochs: int
    idle: tuple[int, ...] = ()
    why: str = ""
    silent: tuple[tuple[str, tuple[int, ...]], ...] = ()
    taught: bool = True

    @property
    def nothing(self) -> bool:
        """True if no epoch trained anything."""
        return 0 < self.epochs == len(self.idle)

    @property
    def sentences(self) -> list[str]:
        """Describe what was not trained, the most important first; empty if every epoch trained."""
        if self.nothing:
            return [f"Nothing was trained in {counted(self.epochs, 'epoch')}: {self.why}. These are the weights that "
                    "the run began with."]
        said = [] if self.taught else [f"The rewards taught nothing: {self.why}. What changed the weights is rounding, "
                                       "or another term of the loss."]
        if self.idle:
            said.append(f"{len(self.idle)} of {counted(self.epochs, 'epoch')} trained nothing "
                        f"({_numbered(self.idle)}): {self.why}.")
        return said + [f"{name} gave no score in {counted(len(epochs), 'epoch')} ({_numbered(epochs)})."
                       for name, epochs in self.silent if not set(epochs) <= set(self.idle)]


def outcome(config: Config, lines: Sequence[dict[str, Any]]) -> Outcome:
    """Return the outcome of a run's lines of metrics so far."""
    if config.preferences is not None and config.labels == "file":
        names: list[str] = []  # their reward is 1/2 throughout
    else:
        names = list(config.rewards)
    skipped = {line["epoch"]: (line.get("skipped_updates") or 0) - (before.get("skipped_updates") or 0)
               for before, line in zip([{}, *lines], lines)}
    unmoved = bool(lines) and (lines[-1].get("weights/change") or 1.0) < UNMOVED
    idle = [line for line in lines if unmoved or not _updates(line)]
    silent = {name: tuple(line["epoch"] for line in lines if _silent(name, line)) for name in names}
    flat = bool(names) and bool(lines) and all(_constant(name, lines) for name in names)
    why = ""
    if any(map(_updates, idle)):
        why = (f"the weights changed by {lines[-1]['weights/change']:.1e} of their size, which no sample shows: "
               f"train.lr is too small ({config.train.rate})")
    elif idle and all(skipped[line["epoch"]] for line in idle):
        why = "the gradient was not finite, so that every update was skipped: look at the precision and train.lr"
    elif idle:
        why = _cause(config, names, idle)
    elif flat:
        why = _cause(config, names, lines)
    return Outcome(len(lines), tuple(line["epoch"] for line in idle), why,
                   tuple((name, epochs) for name, epochs in silent.items() if epochs), not flat)


def untrained(summary: dict[str, Any]) -> list[str]:
    """Return the sentences on what was not trained of a run's summary.json; none of earlier versions.

    Raises UserError if the file has another form.
    """
    known = summary.get("trained", {"said": []})
    if not isinstance(known, dict) or not isinstance(known.get("said"), list):
        raise UserError(f"summary.json: trained is {str(known)[:40]}, expected a list under `said`: restore the file")
    return [*map(str, known["said"])]


def _updates(line: dict[str, Any]) -> bool:
    """Return True if an epoch made an update; lines of earlier versions have its gradient's norm alone."""
    return bool(line["trained_updates"] if "trained_updates" in line else line.get("grad_norm", 1.0) != 0)


def _silent(name: str, line: dict[str, Any]) -> bool:
    return line.get(f"reward/{name}/mean", 0.0) is None and bool(line.get(f"reward/{name}/failed"))


def _constant(name: str, lines: Sequence[dict[str, Any]]) -> bool:
    """Return True if a reward gave all samples of these epochs one score, or none; False if a line does not say."""
    means = [line.get(f"reward/{name}/mean", math.nan) for line in lines]
    spreads = [line.get(f"reward/{name}/std", math.nan) for line, mean in zip(lines, means) if mean is not None]
    known = [mean for mean in means if mean is not None]
    return not known or (all(spread == 0 for spread in spreads)
                         and max(known) - min(known) <= 1e-6 * max(map(abs, known)))


def _cause(config: Config, names: Sequence[str], lines: Sequence[dict[str, Any]]) -> str:
    """Describe why these epochs had no gradient, reward by reward."""
    if names and not any(config.rewards[name] or config.trained[name].limit for name in names):
        return f"{joined(names)} {'has' if len(names) == 1 else 'have'} the weight 0"
    said = [_of_reward(name, lines) for name in names if config.rewards[name] or config.trained[name].limit]
    return " and ".join(filter(None, said)) or "the gradient was 0"


def _of_reward(name: str, lines: Sequence[dict[str, Any]]) -> str:
    """Describe how a reward told no samples apart; empty if it did."""
    means = [line.get(f"reward/{name}/mean") for line in lines]
    if all(mean is None for mean in means):
        return f"{name} gave no score" if any(_silent(name, line) for line in lines) else f"{name} applied to no sample"
    if _constant(name, lines):
        return f"{name} gave every sample {next(mean for mean in means if mean is not None):.4g}"
    shares = [line.get(f"reward/{name}/zero_variance_groups") for line in lines]
    if all(share is None or share == 1.0 for share in shares):
        return f"{name} gave all samples of a prompt the same score"
    return ""


def _numbered(epochs: Sequence[int]) -> str:
    """Return numbers of epochs in words."""
    first, last = epochs[0], epochs[-1]
    if len(epochs) > 1 and last - first + 1 == len(epochs):
        return f"epochs {first} to {last}"
    if len(epochs) <= SHOWN:
        return f"epoch{'s' * (len(epochs) > 1)} {joined([*map(str, epochs)])}"
    return f"epochs {', '.join(map(str, epochs[:SHOWN]))} and {len(epochs) - SHOWN} more"
