"""Summary of a report in plain words: the change on the held-out prompts, and its reliability."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowgrpo.config.schema import Config
from flowgrpo.data import sets
from flowgrpo.evaluation.numbers import bounds, decimals, fixed
from flowgrpo.evaluation.report import symptoms
from flowgrpo.evaluation.report.outcome import outcome
from flowgrpo.evaluation.statistics import LEAST, Interval, blind, change, interval, method_of
from flowgrpo.nouns import counted, joined, named


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
    def known(self) -> bool:
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
        lines = [[label, fixed(of.mean, self.digits, sign), bounds(of.low, of.high, self.digits, sign)]
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
              structure: dict[str, Any] | None = None, base: dict[str, Any] | None = None) -> list[dict[str, str]]:
    """Return the summary: {text, tone}, with tone plain, good or warn.

    kept, structure: of summary.json. base: the base's stage.
    """
    goal = joined([name if rule.weight == 1 else f"{name} ({rule.strength})" for name, rule in
                    config.trained.items()])
    line = lines[-1] if lines else {"epoch": 0, "evaluations": 0, "seconds": 0.0}
    ended = outcome(config, lines)
    untrained = [("warn", sentence) for sentence in ended.sentences]
    doing = "is being" if not finished else "was to be" if ended.nothing else "was"
    toned = [("plain", f"{config.model} {doing} aligned to {goal} with {config.method}: "
                       f"{line['epoch']} of {counted(config.train.epochs, 'epoch')}, "
                       f"{line['evaluations']:,} {nouns.unit}, {_duration(line['seconds'])} of training.")]
    toned = untrained + toned if ended.nothing or not ended.taught else toned + untrained
    toned += [("warn", f"{sets.caution(config.prompts)}.")] if config.train_on_test_set else []
    toned += [("plain", f"{kept[0].upper()}{kept[1:]}.")] if kept else []
    if any(each.known for each in reward_changes) and lines:
        toned += [_moved(each, nouns.sample, ended.nothing) for each in reward_changes if each.known]
        toned += _hacking(reward_changes, nouns.sample)
    toned += _structure(structure)
    toned += [(tone, f"{said[0].upper()}{said[1:]}.")
              for tone, said in (blind(base["scores"], base.get("shuffled") or {}) if base else ())]
    first = last.get("first_ratio", {})
    toned += [("warn", f"{symptom.name.capitalize()}: {symptom.text}.")
              for symptom in symptoms.of_run(config, lines, first.get("clip"))]
    toned += _first_ratio(first)
    return [{"tone": tone, "text": text} for tone, text in toned]


def _moved(moved: Change, sample: str, untrained: bool = False) -> tuple[str, str]:
    """Describe one reward's change in a sentence. untrained: no weight changed."""
    kind = "trained on" if moved.weight is not None else "eval-only"
    images = f"{moved.count} held-out {named(moved.count, sample)}"
    before, now = (fixed(of.mean, moved.digits) for of in (moved.before, moved.now))
    by, low, high = (fixed(value, moved.digits, "+")
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
    """Warn of possible reward hacking: a trained reward rose while a watched one fell."""
    risen = [each.name for each in reward_changes if each.weight is not None and each.way > 0]
    fallen = [each.name for each in reward_changes if each.weight is None and each.way < 0]
    if risen and fallen:
        return [("warn", f"Possible reward hacking: {joined(risen)} got better, while {joined(fallen)}, which was "
                         f"eval-only, fell. Look at the {sample}s.")]
    if all(each.weight is not None for each in reward_changes):
        return [("plain", "No reward was eval-only, so reward hacking would not show in these numbers: name one or "
                          f"two under eval.rewards, and look at the {sample}s.")]
    return []


def _structure(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Describe the likeness of the images to the base's."""
    if not found:
        return []
    of = "the same prompt and seed" if found["images"] == 1 else "the same prompts and seeds"
    return [("plain", f"Images have kept {found['ssim']:.2f} of the base's structure (SSIM of {of}, "
                      f"{counted(found['images'], 'image')}).")]


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
