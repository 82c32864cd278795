"""Summary of a report in plain words: the change on the held-out prompts and its reliability; and the outcome of a run,
from its lines of metrics: the epochs that trained nothing, and why.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    directions,
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


def outcome(config: Config, lines: Sequence[dict[str, Any]], errors: Mapping[str, str] = {},
            ranges: Mapping[str, symptoms.Scale | None] = {}) -> Outcome:
    """Outcome of a run's lines of metrics so far. errors: the last error of each reward that failed.
    ranges: as of `symptoms.of_run`."""
    by_file = config.preferences is not None and config.labels == "file"
    names = [] if by_file else list(config.rewards)  # else the reward is 1/2 throughout
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
        why = _cause(config, names, idle, errors, ranges)
    elif flat:
        why = _cause(config, names, lines, errors, ranges)
    return Outcome(len(lines), tuple(line["epoch"] for line in idle), why,
                   tuple((name, epochs) for name, epochs in silent.items() if epochs), not flat, errors)


def untrained_lines(summary: dict[str, Any]) -> list[str]:
    """Lines of a run's summary.json on untrained parts; none of earlier versions. Raises UserError for another form."""
    known = summary.get("trained", {"said": []})
    if not isinstance(known, dict) or not isinstance(known.get("said"), list):
        raise UserError(f"summary.json: trained is {str(known)[:40]}, expected a list under `said`: restore the file")
    return [*map(str, known["said"])]


def _updates(line: dict[str, Any]) -> bool:  # lines of earlier versions have the gradient's norm alone
    return bool(line["trained_updates"] if "trained_updates" in line else line.get("grad_norm", 1.0) != 0)


def _silent(name: str, line: dict[str, Any]) -> bool:
    return line.get(f"reward/{name}/mean", 0.0) is None and bool(line.get(f"reward/{name}/failed"))


def _constant(name: str, lines: Sequence[dict[str, Any]]) -> bool:
    means = [line.get(f"reward/{name}/mean", math.nan) for line in lines]
    spreads = [line.get(f"reward/{name}/std", math.nan) for line, mean in zip(lines, means) if mean is not None]
    known = [mean for mean in means if mean is not None]
    return not known or (all(spread == 0 for spread in spreads)
                         and max(known) - min(known) <= 1e-6 * max(map(abs, known)))


def last_error(error: str | None) -> str:
    """End of a sentence on a reward that gave no score; empty without an error."""
    return f" (its last error: {error})" if error else ""


def _cause(config: Config, names: Sequence[str], lines: Sequence[dict[str, Any]], errors: Mapping[str, str],
           ranges: Mapping[str, symptoms.Scale | None]) -> str:
    """Describe why these epochs had no gradient, reward by reward."""
    if names and not any(config.rewards[name] or config.trained[name].limit for name in names):
        return f"{join_words(names)} {'has' if len(names) == 1 else 'have'} the weight 0"
    said = []
    for name in (name for name in names if config.rewards[name] or config.trained[name].limit):
        means, shares = ([line.get(f"reward/{name}/{what}") for line in lines]
                         for what in ("mean", "zero_variance_groups"))
        scores = [mean for mean in means if mean is not None]
        if not scores:
            failed = any(_silent(name, line) for line in lines)
            said.append(f"{name} gave no score{last_error(errors.get(name))}" if failed else
                        f"{name} applied to no sample")
        elif _constant(name, lines):
            solved = symptoms.solved(config.trained[name].direction, scores, ranges.get(name), 1)
            said.append(f"{name} gave every sample {scores[0]:.4g}"
                        + ", its best score: take harder prompts" * solved)
        elif all(share is None or share == 1.0 for share in shares):
            said.append(f"{name} gave all samples of a prompt the same score")
    return " and ".join(said) or "the gradient was 0"


def _epoch_list(epochs: Sequence[int]) -> str:
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
    way: 1: got better, -1: got worse, 0: neither, or it may be chance, among `beside` changes of its kind.
    """

    name: str
    weight: float | None
    before: Interval
    now: Interval
    change: Interval
    count: int
    way: int = 0
    beside: int = 1

    @property
    def few(self) -> bool:
        return self.change.prompts < LEAST

    @property
    def digits(self) -> int:
        return decimals([self.before.mean, self.now.mean], [self.change.mean])

    def as_json(self) -> dict[str, Any]:
        """For the page: numbers as text."""
        shown = (("before", self.before, ""), ("now", self.now, ""), ("change", self.change, "+"))
        lines = [[label, format_value(of.mean, self.digits, sign), bounds(of.low, of.high, self.digits, sign)]
                 for label, of, sign in shown]
        moved = (self.change.mean > 0) - (self.change.mean < 0)
        return {"name": self.name, "weight": self.weight, "lines": lines, "count": self.count, "way": self.way,
                "moved": moved, "method": self.change.method}


def changes(config: Config, stages: list[dict[str, Any]]) -> list[Change]:
    """The rewards' changes from the first stage to the last; empty before a second measurement.

    What may be chance is decided for the trained rewards together, and for the eval-only ones (`directions`).
    """
    if len(stages) < 2:
        return []
    first, last = stages[0]["scores"], stages[-1]["scores"]
    wanted = {name: rule.direction for name, rule in config.trained.items() if rule.direction}
    found = []
    for name, was in first.items():  # of the samples that have a score at both times
        now = last.get(name, [])
        count = min(len(was), len(now)) // config.eval.samples * config.eval.samples
        old, new = (np.array(scores[:count], dtype=np.float64).reshape(-1, config.eval.samples)
                    for scores in (was, now))
        method, lacks = method_of(old, new), np.isnan(old) | np.isnan(new)
        before, after = (interval(np.where(lacks, math.nan, scores), method) for scores in (old, new))
        moved = change(old, new, method)
        found.append(Change(name, wanted.get(name), before, after, moved, int((~lacks).sum())))
    judged = {}
    for watched in (False, True):
        kind = {each.name: each for each in found if (each.weight is None) == watched and each.count}
        beside = sum(not each.few for each in kind.values())
        for name, way in directions({name: each.change for name, each in kind.items()}).items():
            sought = -1 if (wanted.get(name) or 0.0) < 0 else 1
            judged[name] = replace(kind[name], way=way * sought, beside=beside)
    return [judged.get(each.name, each) for each in found]


def sentences(config: Config, lines: list[dict[str, Any]], reward_changes: list[Change], last: dict[str, Any],
              finished: bool, summary: Mapping[str, Any] = {}, base: dict[str, Any] | None = None,
              shares: Mapping[str, float] = {}, ranges: Mapping[str, symptoms.Scale | None] = {}, anew: bool = False,
              sample: str = "image", unit: str = "denoiser evaluations") -> list[dict[str, str]]:
    """Summary: {text, tone}, with tone plain, good or warn.

    summary: of summary.json. base: the base's stage. shares: looks of the last stage as shares of the base's.
    ranges: as of `outcome`. anew: the changes are of prompts that chose nothing. sample, unit: names of a sample, and
    of what evaluations are.
    """
    kept, structure = summary.get("kept"), summary.get("structure")
    # What was trained, how long, and which epochs trained nothing.
    line = lines[-1] if lines else {"epoch": 0, "evaluations": 0, "seconds": 0.0}
    ended = outcome(config, lines, summary.get("reward_failures", {}).get("errors", {}), ranges)
    unheard = {name for name, epochs in ended.silent if len(epochs) == ended.epochs and not ended.nothing}
    rules = {name: rule for name, rule in config.trained.items() if rule.direction}
    goal = join_words([name if rule.weight == 1 else f"{name} ({rule.strength})" for name, rule in rules.items()
                       if name not in unheard or unheard >= {*rules}])
    untrained = [("warn", sentence) for sentence in ended.sentences]
    minutes, seconds = divmod(round(line["seconds"]), 60)
    hours, minutes = divmod(minutes, 60)
    duration = f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    doing = "is being" if not finished else "was to be" if ended.nothing else "was"
    toned = [("plain", f"{config.model} {doing} trained on {goal} with {config.method}: "
                       f"{line['epoch']} of {quantity(config.train.epochs, 'epoch')}, "
                       f"{line['evaluations']:,} {unit}, {duration} of training.")]
    toned = untrained + toned if ended.nothing or not ended.taught else toned + untrained
    toned += [("warn", f"{sets.caution(config.prompts)}.")] if config.train_on_test_set else []
    toned += [("plain", f"{kept[0].upper()}{kept[1:]}.")] if kept else []
    # What it did on held-out prompts: to the rewards, to the images, and to what the scores mean.
    if (scored := [each for each in reward_changes if each.count]) and lines:
        toned += [_describe_change(each, sample, ended.nothing, anew) for each in scored]
        toned += _hacking(reward_changes, sample)
    if structure:
        of = "the same prompt and seed" if structure["images"] == 1 else "the same prompts and seeds"
        toned += [("plain", f"Images have kept {structure['ssim']:.2f} of the base's structure (SSIM of {of}, "
                            f"{quantity(structure['images'], 'image')}).")]
    toned += looks.describe_looks(shares)
    toned += [(tone, f"{said[0].upper()}{said[1:]}.")
              for tone, said in (blind(base["scores"], base.get("shuffled") or {}) if base else ())]
    # What looks wrong in the last epochs, and the check before the first update.
    first = last.get("first_ratio", {})
    toned += [("warn", f"{name.capitalize()}: {text}.")
              for name, text in symptoms.of_run(config, lines, first.get("clip"), ranges).items()]
    if first.get("found") is not None:
        largest = f"{first['found']:.1e}" if first["found"] else "0"
        text = f"Before the first update, the largest |log ratio| of replay to rollout was {largest}"
        toned += [("plain", f"{text}, above {first['limit']:.1e}: old log-probabilities are computed again as the "
                            "replay does.")] if first["rescored"] else \
            [("good", f"{text} (at most {first['limit']:.1e} is right): the two agree.")]
    return [{"tone": tone, "text": text} for tone, text in toned]


def _describe_change(moved: Change, sample: str, untrained: bool = False, anew: bool = False) -> tuple[str, str]:
    """Describe one reward's change in a sentence. untrained: no weight changed. anew: its prompts chose nothing."""
    kind = "trained on" if moved.weight is not None else "eval-only"
    images = f"{moved.count} held-out {inflect(moved.count, sample)}" + " that chose nothing" * anew
    before, now = (format_value(of.mean, moved.digits) for of in (moved.before, moved.now))
    by, low, high = (format_value(value, moved.digits, "+")
                     for value in (moved.change.mean, moved.change.low, moved.change.high))
    certain = "" if low == "-" else f", 95 %: {low} to {high}"
    ends = f"from {before} to {now} on {images} ({by}{certain})"
    if moved.change.mean == 0 and (untrained or moved.change.low == moved.change.high == 0):
        return "plain", f"{moved.name}, {kind}, stayed at {before} on {images}."
    if not moved.way:
        of_many = "" if moved.change.low <= 0 <= moved.change.high else \
            f" among {moved.beside} {kind.removesuffix(' on')} rewards"
        why = f": too few prompts to tell (at least {LEAST})" if moved.few else f", which may be chance{of_many}"
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
                          f"next run's eval.rewards, such as {other}, and look at the {sample}s.")]
    return []
