"""Summary of a report in plain words: the change on the held-out prompts and its reliability; and the outcome of a run,
from its lines of metrics: the epochs that trained nothing, and why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowgrpo.config.schema import Config
from flowgrpo.data import sets
from flowgrpo.errors import UserError
from flowgrpo.evaluation import looks
from flowgrpo.evaluation.report import symptoms
from flowgrpo.evaluation.statistics import (
    LEAST,
    Interval,
    blind,
    bounds,
    change,
    decimals,
    format_value,
    interval,
    method_of,
)
from flowgrpo.nouns import SAMPLE, inflect, join_words, quantity

UNMOVED = 1e-7  # change of the weights, as `TrainableWeights.change`, that no sample shows
SHOWN = 3  # epochs that are named one by one


@dataclass(frozen=True)
class Outcome:
    """Account of what a run trained.

    epochs: that are done. idle: those that trained nothing; why: the cause of these.
    silent: epochs in which a trained reward was asked and gave no score, by reward.
    taught: False if no reward told one sample from another in any epoch, though the weights changed.
    errors: the last error of each reward that failed.
    """

    epochs: int
    idle: tuple[int, ...] = ()
    why: str = ""
    silent: tuple[tuple[str, tuple[int, ...]], ...] = ()
    taught: bool = True
    errors: Mapping[str, str] = field(default_factory=dict)

    @property
    def nothing(self) -> bool:
        """True if no epoch trained anything."""
        return 0 < self.epochs == len(self.idle)

    @property
    def sentences(self) -> list[str]:
        """Describe what was not trained, the most important first; empty if every epoch trained."""
        if self.nothing:
            return [f"Nothing was trained in {quantity(self.epochs, 'epoch')}: {self.why}. These are the weights that "
                    "the run began with."]
        said = [] if self.taught else [f"The rewards taught nothing: {self.why}. What changed the weights is rounding, "
                                       "or another term of the loss."]
        if self.idle:
            said.append(f"{len(self.idle)} of {quantity(self.epochs, 'epoch')} trained nothing "
                        f"({_epoch_list(self.idle)}): {self.why}.")
        return said + [f"{name} gave no score in {quantity(len(epochs), 'epoch')} ({_epoch_list(epochs)})"
                       f"{last_error(self.errors.get(name))}."
                       for name, epochs in self.silent if not set(epochs) <= set(self.idle)]


def outcome(config: Config, lines: Sequence[dict[str, Any]], errors: Mapping[str, str] = {}) -> Outcome:
    """Return the outcome of a run's lines of metrics so far. errors: the last error of each reward that failed."""
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
        why = _cause(config, names, idle, errors)
    elif flat:
        why = _cause(config, names, lines, errors)
    return Outcome(len(lines), tuple(line["epoch"] for line in idle), why,
                   tuple((name, epochs) for name, epochs in silent.items() if epochs), not flat, errors)


def untrained_lines(summary: dict[str, Any]) -> list[str]:
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


def last_error(error: str | None) -> str:
    """Return the end of a sentence on a reward that gave no score; empty without an error."""
    return f" (its last error: {error})" if error else ""


def _cause(config: Config, names: Sequence[str], lines: Sequence[dict[str, Any]], errors: Mapping[str, str]) -> str:
    """Describe why these epochs had no gradient, reward by reward."""
    if names and not any(config.rewards[name] or config.trained[name].limit for name in names):
        return f"{join_words(names)} {'has' if len(names) == 1 else 'have'} the weight 0"
    said = [_of_reward(name, lines, errors.get(name)) for name in names
            if config.rewards[name] or config.trained[name].limit]
    return " and ".join(filter(None, said)) or "the gradient was 0"


def _of_reward(name: str, lines: Sequence[dict[str, Any]], error: str | None) -> str:
    """Describe how a reward told no samples apart; empty if it did."""
    means = [line.get(f"reward/{name}/mean") for line in lines]
    if all(mean is None for mean in means):
        failed = any(_silent(name, line) for line in lines)
        return f"{name} gave no score{last_error(error)}" if failed else f"{name} applied to no sample"
    if _constant(name, lines):
        return f"{name} gave every sample {next(mean for mean in means if mean is not None):.4g}"
    shares = [line.get(f"reward/{name}/zero_variance_groups") for line in lines]
    if all(share is None or share == 1.0 for share in shares):
        return f"{name} gave all samples of a prompt the same score"
    return ""


def _epoch_list(epochs: Sequence[int]) -> str:
    """Return numbers of epochs in words."""
    first, last = epochs[0], epochs[-1]
    if len(epochs) > 1 and last - first + 1 == len(epochs):
        return f"epochs {first} to {last}"
    if len(epochs) <= SHOWN:
        return f"epoch{'s' * (len(epochs) > 1)} {join_words([*map(str, epochs)])}"
    return f"epochs {', '.join(map(str, epochs[:SHOWN]))} and {len(epochs) - SHOWN} more"


@dataclass(frozen=True)
class Change:
    """Reward on the same held-out prompts and seeds, before training and now.

    weight: in training, of a limited reward its sign; None if eval-only.
    before, now, change: means over prompts, with intervals.
    count: samples that have a score at both times.
    """

    name: str
    weight: float | None
    before: Interval
    now: Interval
    change: Interval
    count: int

    @property
    def has_scores(self) -> bool:
        """True if any sample has a score at both times."""
        return self.count > 0

    @property
    def few(self) -> bool:
        """True with too few prompts for a verdict."""
        return self.change.prompts < LEAST

    @property
    def way(self) -> int:
        """1: rose as wanted, -1: fell, 0: neither, or it may be chance: the interval of the change holds 0."""
        if self.few or not (self.change.low > 0 or self.change.high < 0):
            return 0
        return 1 if self.change.mean * (-1 if (self.weight or 0.0) < 0 else 1) > 0 else -1

    @property
    def digits(self) -> int:
        """Decimals of its numbers."""
        return decimals([self.before.mean, self.now.mean], [self.change.mean])

    def as_json(self) -> dict[str, Any]:
        """Return the change for the page: numbers as text."""
        shown = (("before", self.before, ""), ("now", self.now, ""), ("change", self.change, "+"))
        lines = [[label, format_value(of.mean, self.digits, sign), bounds(of.low, of.high, self.digits, sign)]
                 for label, of, sign in shown]
        moved = (self.change.mean > 0) - (self.change.mean < 0)
        return {"name": self.name, "weight": self.weight, "lines": lines, "count": self.count, "way": self.way,
                "moved": moved, "method": self.change.method}


@dataclass(frozen=True)
class Nouns:
    """Names of a sample, and of what evaluations are."""

    sample: str = "image"
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
    wanted = {name: rule.direction for name, rule in config.trained.items()}
    return [_change(name, wanted.get(name), was[name], now.get(name, []), samples) for name in was]


def _change(name: str, weight: float | None, was: list[float | None], now: list[float | None], samples: int) -> Change:
    """Return a reward's change from scores with so many samples per prompt, of the samples scored at both times."""
    count = min(len(was), len(now)) // samples * samples
    old, new = (np.array(scores[:count], dtype=np.float64).reshape(-1, samples) for scores in (was, now))
    method = method_of(old, new)
    lacks = np.isnan(old) | np.isnan(new)
    before, after = (interval(np.where(lacks, math.nan, scores), method) for scores in (old, new))
    return Change(name, weight, before, after, change(old, new, method), int((~lacks).sum()))


def sentences(config: Config, lines: list[dict[str, Any]], reward_changes: list[Change], last: dict[str, Any],
              finished: bool, kept: str | None = None, nouns: Nouns = Nouns(),
              structure: dict[str, Any] | None = None, base: dict[str, Any] | None = None,
              shares: dict[str, float] | None = None, errors: Mapping[str, str] = {}) -> list[dict[str, str]]:
    """Return the summary: {text, tone}, with tone plain, good or warn.

    kept, structure: of summary.json. base: the base's stage. shares: looks of the last stage as shares of the base's.
    errors: as of `outcome`.
    """
    line = lines[-1] if lines else {"epoch": 0, "evaluations": 0, "seconds": 0.0}
    ended = outcome(config, lines, errors)
    unheard = {name for name, epochs in ended.silent if len(epochs) == ended.epochs and not ended.nothing}
    goal = join_words([name if rule.weight == 1 else f"{name} ({rule.strength})" for name, rule in
                       config.trained.items() if name not in unheard or unheard == {*config.trained}])
    untrained = [("warn", sentence) for sentence in ended.sentences]
    doing = "is being" if not finished else "was to be" if ended.nothing else "was"
    toned = [("plain", f"{config.model} {doing} trained on {goal} with {config.method}: "
                       f"{line['epoch']} of {quantity(config.train.epochs, 'epoch')}, "
                       f"{line['evaluations']:,} {nouns.unit}, {_duration(line['seconds'])} of training.")]
    toned = untrained + toned if ended.nothing or not ended.taught else toned + untrained
    toned += [("warn", f"{sets.caution(config.prompts)}.")] if config.train_on_test_set else []
    toned += [("plain", f"{kept[0].upper()}{kept[1:]}.")] if kept else []
    if any(each.has_scores for each in reward_changes) and lines:
        toned += [_describe_change(each, nouns.sample, ended.nothing) for each in reward_changes if each.has_scores]
        toned += _hacking(reward_changes, nouns.sample)
    toned += _structure(structure)
    toned += looks.describe_looks(shares or {})
    toned += [(tone, f"{said[0].upper()}{said[1:]}.")
              for tone, said in (blind(base["scores"], base.get("shuffled") or {}) if base else ())]
    first = last.get("first_ratio", {})
    toned += [("warn", f"{symptom.name.capitalize()}: {symptom.text}.")
              for symptom in symptoms.of_run(config, lines, first.get("clip"))]
    toned += _first_ratio(first)
    return [{"tone": tone, "text": text} for tone, text in toned]


def _describe_change(moved: Change, sample: str, untrained: bool = False) -> tuple[str, str]:
    """Describe one reward's change in a sentence. untrained: no weight changed."""
    kind = "trained on" if moved.weight is not None else "eval-only"
    images = f"{moved.count} held-out {inflect(moved.count, sample)}"
    before, now = (format_value(of.mean, moved.digits) for of in (moved.before, moved.now))
    by, low, high = (format_value(value, moved.digits, "+")
                     for value in (moved.change.mean, moved.change.low, moved.change.high))
    certain = "" if low == "-" else f", 95 %: {low} to {high}"
    ends = f"from {before} to {now} on {images} ({by}{certain})"
    if moved.change.mean == 0 and (untrained or moved.change.low == moved.change.high == 0):
        return "plain", f"{moved.name}, {kind}, stayed at {before} on {images}."
    if not moved.way:
        why = f": too few prompts to tell (at least {LEAST})" if moved.few else ", which may be chance"
        return "plain", f"{moved.name}, {kind}, went {ends}{why}."
    verb = "rose" if moved.change.mean > 0 else "fell"
    return "good" if moved.way > 0 else "warn", f"{moved.name}, {kind}, {verb} {ends}."


def _hacking(reward_changes: list[Change], sample: str) -> list[tuple[str, str]]:
    """Warn of possible reward hacking: a trained reward rose while an eval-only one fell."""
    risen = [each.name for each in reward_changes if each.weight is not None and each.way > 0]
    fallen = [each.name for each in reward_changes if each.weight is None and each.way < 0]
    if risen and fallen:
        return [("warn", f"Possible reward hacking: {join_words(risen)} got better, while {join_words(fallen)}, which "
                         f"was eval-only, fell. Look at the {sample}s.")]
    if all(each.weight is not None for each in reward_changes):
        other = "completion_length" if sample == SAMPLE["text"] else "over_saturation"
        return [("plain", "No reward was eval-only, that is measured and not trained on, so reward hacking, in which a "
                          f"score rises and the {sample}s get worse, would not show in these numbers: add one to the "
                          f"next run, such as --eval.rewards=[{other}], and look at the {sample}s.")]
    return []


def _structure(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Describe the likeness of the images to the base's."""
    if not found:
        return []
    of = "the same prompt and seed" if found["images"] == 1 else "the same prompts and seeds"
    return [("plain", f"Images have kept {found['ssim']:.2f} of the base's structure (SSIM of {of}, "
                      f"{quantity(found['images'], 'image')}).")]


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


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
