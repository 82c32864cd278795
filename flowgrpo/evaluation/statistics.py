"""Statistics of scores: intervals of means, changes and win rates, signs of drift, numbers as text with one number of
decimals for all values of a reward, and the table of scores by arm, reward, prompt and sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from flowgrpo.escaped import plain
from flowgrpo.nouns import quantity

if TYPE_CHECKING:
    from rich.console import Console

MOST = 6  # decimals
CONFIDENCE = 0.95
Z = 1.959963984540054  # of a normal distribution, for CONFIDENCE
RESAMPLES = 2000
LEAST = 20  # prompts; with fewer, a bootstrap's interval is too narrow to report drift
PAIRS = 8  # images under their own prompts and others; with fewer, nothing is said of whether a reward reads prompts
EXACT = 1e-5  # relative difference of scores that is rounding
NEAR = 0.5  # of the std of scores: changes of a mean within it are small
WILSON, BOOTSTRAP = "Wilson", "bootstrap over prompts"
ALL = "all prompts"  # row of all categories


def decimals(values: Iterable[float | None], changes: Iterable[float | None] = ()) -> int:
    """Return the decimals for a column of values: three significant digits of the largest value, two of the largest
    change, at least 3 below 10 and 1 above, at most MOST. None and NaN count for nothing."""
    largest, moved = _largest(values), _largest(changes)
    digits = 1 if largest >= 10 else max(2 - _exponent(largest), 3) if largest else 3
    return min(max(digits, 1 - _exponent(moved) if moved else 0), MOST)


def _largest(values: Iterable[float | None]) -> float:
    return max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0)


def _exponent(value: float) -> int:
    return math.floor(math.log10(value))


def format_value(value: float | None, digits: int, sign: str = "") -> str:
    """Return a value with so many decimals, a dash for None and NaN. sign: "+" for changes."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value if round(value, digits) else 0.0:{sign if round(value, digits) else ''}.{digits}f}"


def format_interval(mean: float | None, low: float | None, high: float | None, digits: int, sign: str = "") -> str:
    """Return a mean with its interval in brackets, if it has one."""
    return f"{format_value(mean, digits, sign)} {bounds(low, high, digits, sign)}".strip()


def bounds(low: float | None, high: float | None, digits: int, sign: str = "") -> str:
    """Return an interval in brackets, an empty text if there is none."""
    ends = [format_value(end, digits, sign) for end in (low, high)]
    return "" if ends[0] == "-" else f"[{ends[0]}, {ends[1]}]"


@dataclass(frozen=True)
class Interval:
    """Mean over `prompts` prompts with its 95 % interval and the interval's method; NaN with too few prompts."""

    mean: float
    low: float
    high: float
    method: str
    prompts: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def method_of(*scores: np.ndarray) -> str:
    """Return the method for all scores of a reward: WILSON if each is 0 or 1, else BOOTSTRAP."""
    values = np.concatenate([np.asarray(array, dtype=np.float64).ravel() for array in scores])
    values = values[~np.isnan(values)]
    return WILSON if len(values) and np.isin(values, (0, 1)).all() else BOOTSTRAP


def interval(scores: np.ndarray, method: str | None = None, samples: int = 1) -> Interval:
    """Return the mean of the prompts' means of scores [N, S], with its interval.

    WILSON (1927): of a share, on the effective number of prompts (Kish's design effect, 1965). That is N if the samples
    of each prompt agree, and up to the number of samples. BOOTSTRAP (Efron 1979): percentiles of means of resampled
    prompts, with a fixed seed; one prompt has no interval, equal ones one without a width.
    method: None takes `method_of(scores)`. samples: number of samples behind a score.
    """
    values, weights = _of_prompts(scores)
    return _interval(values, method or method_of(scores), float(weights.sum()) * samples)


def _of_prompts(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the number of scores of each prompt that has any."""
    scores = np.asarray(scores, dtype=np.float64)
    there = ~np.isnan(scores)
    scores, there = scores[there.any(1)], there[there.any(1)]
    return np.where(there, scores, 0).sum(1) / there.sum(1), there.sum(1)


def _interval(values: np.ndarray, method: str, total: float) -> Interval:
    """Return the interval of the mean of the prompts' values [N], from so many samples in total."""
    count = len(values)
    mean = float(values.mean()) if count else math.nan
    if not count or (method == BOOTSTRAP and count < 2):
        return Interval(mean, math.nan, math.nan, method, count)
    low, high = _wilson(values, total) if method == WILSON else _bootstrap(values)
    return Interval(mean, low, high, method, count)


def _wilson(values: np.ndarray, total: float) -> tuple[float, float]:
    share, spread, count = float(values.mean()), float(values.var()), len(values)
    size = count * share * (1 - share) / spread if spread else total if 0 < share < 1 else count
    size = max(min(size, total), count)
    middle = share + Z * Z / (2 * size)
    half = Z * math.sqrt(share * (1 - share) / size + Z * Z / (4 * size * size))
    low, high = ((middle + side * half) / (1 + Z * Z / size) for side in (-1, 1))
    return min(max(low, 0.0), share), max(min(high, 1.0), share)


def _bootstrap(values: np.ndarray) -> tuple[float, float]:
    rng, count = np.random.default_rng(0), len(values)
    means = [values[rng.integers(0, count, (100, count))].mean(1) for _ in range(RESAMPLES // 100)]
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(np.concatenate(means), (tail, 100 - tail))
    return float(low), float(high)


def change(base: np.ndarray, tuned: np.ndarray, method: str | None = None) -> Interval:
    """Return the mean of tuned minus base [N, S] on the same prompts and seeds, with its interval.

    WILSON: Newcombe's interval of paired shares (1998), from Wilson's limits of both and their correlation over
    prompts. method: None takes that of both arrays.
    """
    base, tuned = (np.asarray(scores, dtype=np.float64) for scores in (base, tuned))
    if (method or method_of(base, tuned)) == BOOTSTRAP:
        return interval(tuned - base, BOOTSTRAP)
    lacks = np.isnan(base) | np.isnan(tuned)
    (old, weights), (new, _) = (_of_prompts(np.where(lacks, math.nan, scores)) for scores in (base, tuned))
    if not len(old):
        return Interval(math.nan, math.nan, math.nan, WILSON, 0)
    total = float(weights.sum())
    before, after = _interval(old, WILSON, total), _interval(new, WILSON, total)
    shared = float(np.cov(old, new, ddof=0)[0, 1])
    shared = max(shared - 1 / (2 * len(old)), 0.0) if shared > 0 else shared  # Newcombe's correction of phi
    alike = shared / float(old.std() * new.std()) if old.std() and new.std() else 0.0
    moved = after.mean - before.mean
    low = moved - _combine_widths(after.mean - after.low, before.high - before.mean, alike)
    high = moved + _combine_widths(after.high - after.mean, before.mean - before.low, alike)
    return Interval(moved, low, high, WILSON, len(old))


def _combine_widths(one: float, other: float, alike: float) -> float:
    return math.sqrt(max(one * one - 2 * alike * one * other + other * other, 0.0))


def mean_of(intervals: Sequence[Interval]) -> Interval:
    """Return the mean of several means, such as a suite's categories, with its interval from theirs (the method of
    variance estimates recovery, Zou and Donner 2008), taken as independent. Intervals without a mean are left out."""
    known = [each for each in intervals if not math.isnan(each.mean)]
    if not known:
        return Interval(math.nan, math.nan, math.nan, BOOTSTRAP, 0)
    means, count = [each.mean for each in known], len(known)
    middle = sum(means) / count
    low = middle - math.sqrt(sum((each.mean - each.low) ** 2 for each in known)) / count
    high = middle + math.sqrt(sum((each.high - each.mean) ** 2 for each in known)) / count
    return Interval(middle, low, high, known[0].method, sum(each.prompts for each in known))


def win_rate(base: np.ndarray, tuned: np.ndarray, method: str | None = None) -> Interval:
    """Return the mean of `wins` with its interval; of shares it is 1/2 plus half of their change."""
    if (method or method_of(base, tuned)) == BOOTSTRAP:
        return interval(wins(base, tuned), BOOTSTRAP)
    moved = change(base, tuned, WILSON)
    mean, low, high = (0.5 + value / 2 for value in (moved.mean, moved.low, moved.high))
    return Interval(mean, low, high, WILSON, moved.prompts)


def wins(base: np.ndarray, tuned: np.ndarray) -> np.ndarray:
    """Return 1 where the tuned sample beats the base's of the same prompt and seed, 1/2 on a tie, 0 where it loses;
    NaN where one has no score. [N, S] -> [N, S]."""
    return np.where(np.isnan(base) | np.isnan(tuned), np.nan, (tuned > base) + 0.5 * (tuned == base))


def drift(changes: dict[str, Interval], trained: Iterable[str] | None, diversity: Interval | None = None,
          unit: str = "images") -> list[str]:
    """Describe the effects of tuning, one sentence each. A change counts if its interval excludes 0.

    changes: tuned minus base, by reward. trained: the trained rewards, None if unknown. diversity: change of the
    distance between a prompt's samples. unit: name of the samples.
    A reward with scores on fewer than LEAST prompts is left out.
    """
    few = [f"nothing is said of drift in {name}: it has scores on {quantity(change.prompts, 'prompt')}, and at least "
           f"{LEAST} are "
           "needed" for name, change in changes.items() if change.prompts < LEAST]
    changes = {name: change for name, change in changes.items() if change.prompts >= LEAST}
    if not changes:
        return few
    rose, fell = ([name for name, change in changes.items() if holds(change)]
                  for holds in (lambda change: change.low > 0, lambda change: change.high < 0))
    said = few + _hacking_lines(changes, None if trained is None else set(trained), rose, fell)
    if diversity is not None and diversity.high < 0:
        said.append(f"the {unit} of a prompt became more alike: {_amount('diversity', diversity)}")
    return said


def _hacking_lines(changes: dict[str, Interval], trained: set[str] | None, rose: list[str], fell: list[str]
                   ) -> list[str]:
    amounts = {name: _amount(name, change) for name, change in changes.items()}
    if trained is None:
        what = ", ".join(amounts[name] for name in rose + fell) or "no reward changed by more than chance"
        return [f"{what} (which reward was trained on is not known, so that nothing is said of hacking)"]
    up, down = ([name for name in side if (name in trained) == mine] for side, mine in ((rose, True), (fell, False)))
    eval_only = [name for name in changes if name not in trained]
    if up and down:
        return [f"possible reward hacking: {_join(amounts, up)}, which was trained on, while "
                f"{_join(amounts, down)}, held out"]
    if not eval_only:
        return ["no held-out reward was measured, so that hacking could not be seen: add one to --rewards"]
    if not up:
        return ["no trained reward rose by more than chance" + (f"; {_join(amounts, down)}" if down else "")]
    return [f"{_join(amounts, up)}; no held-out reward ({', '.join(eval_only)}) fell by more than chance"]


def _join(amounts: dict[str, str], names: list[str]) -> str:
    return " and ".join(amounts[name] for name in names)


def _amount(name: str, change: Interval) -> str:
    way = "rose" if change.mean > 0 else "fell"
    digits = decimals([], [change.mean])
    return (f"{name} {way} by {abs(change.mean):.{digits}f} "
            f"(95 %: {change.low:+.{digits}f} to {change.high:+.{digits}f})")


def blind(scores: Mapping[str, Sequence[float | None]], shuffled: Mapping[str, Sequence[float | None]]
          ) -> list[tuple[str, str]]:
    """Describe the rewards whose mean under other prompts is not known to differ from that under their own, each with
    the tone of a report: warn where the paired 95 % interval of the difference is within NEAR std of the scores.

    scores, shuffled: [N] by reward; NaN or None where there is none. A reward with fewer than PAIRS pairs is left out.
    """
    said: list[tuple[str, str]] = []
    for name, values in shuffled.items():
        own, other = (np.array(each, dtype=np.float64) for each in (scores[name], values))
        known = ~np.isnan(own) & ~np.isnan(other)
        own, other, count = own[known], other[known], int(known.sum())
        if count < PAIRS:
            continue
        found = change(other[:, None], own[:, None])
        digits = decimals([own.mean(), other.mean()], [found.mean])
        theirs, mine = format_value(other.mean(), digits), format_value(own.mean(), digits)
        if np.allclose(own, other, rtol=EXACT, atol=0) and np.ptp(own):
            said.append(("plain", f"reward {name!r} does not read the prompt: {count} images have the same scores "
                                  "under other prompts"))
        elif 0 <= -found.low <= NEAR * own.std() and 0 <= found.high <= NEAR * own.std():
            said.append(("warn", f"reward {name!r} gives images the same scores under other prompts ({theirs} against "
                                 f"{mine} on {count} images): it does not tell whether an image fits its prompt"))
        elif found.low <= 0 <= found.high:
            said.append(("plain", f"reward {name!r} may not tell whether an image fits its prompt: on {count} images "
                                  f"{theirs} under other prompts against {mine} under their own, a difference of "
                                  f"{found.low:+.{digits}f} to {found.high:+.{digits}f} (95 %); more eval.prompts "
                                  "narrow it"))
    return said


Entry = dict[str, Any]  # an interval in its JSON form
Rows = dict[str, dict[str, Entry]]  # by category: the intervals of all arms, and `change`


@dataclass(frozen=True)
class Scores:
    """Scores of an evaluation.

    arms: by arm and reward, [N, S] of N prompts with S samples each, NaN where the reward does not apply.
    categories: rows of each category, and of `ALL`.
    """

    arms: dict[str, dict[str, np.ndarray]]
    categories: dict[str, list[int]]

    @cached_property
    def methods(self) -> dict[str, str]:
        """Return the method of a reward's intervals, by reward."""
        rewards = next(iter(self.arms.values()))
        return {name: method_of(*(of_arm[name] for of_arm in self.arms.values())) for name in rewards}

    def means(self) -> dict[str, dict[str, dict[str, Entry]]]:
        """Return means with intervals, by arm, reward and category."""
        return {arm: {name: {category: interval(values[rows], self.methods[name]).as_json()
                             for category, rows in self.categories.items()} for name, values in of_arm.items()}
                for arm, of_arm in self.arms.items()}

    def pairs(self, of: Callable[..., Interval] = change) -> dict[str, dict[str, Entry]]:
        """Return a statistic of the first arm and the second on the same prompts and seeds, by reward and category."""
        first, second = self.arms.values()
        return {name: {category: of(first[name][rows], second[name][rows], self.methods[name]).as_json()
                       for category, rows in self.categories.items()} for name in first}


def cells(rows: Rows) -> list[list[str]]:
    """Return a line of text per row: task, before, after and change, with one number of decimals."""
    digits = digits_of(rows)
    return [[task, *(cell(entry, digits, "+" * (key == "change")) for key, entry in row.items())]
            for task, row in rows.items()]


def digits_of(rows: Rows) -> int:
    """Return the decimals of a table."""
    return decimals((row[key]["mean"] for row in rows.values() for key in ("before", "after")),
                    [rows[ALL]["change"]["mean"]])


def cell(entry: Entry, digits: int = 3, sign: str = "") -> str:
    """Return a mean with its interval as text. sign: "+" for changes."""
    return format_interval(entry["mean"], entry["low"], entry["high"], digits, sign)


def show(console: Console, title: str, caption: str, headings: Sequence[str], lines: Sequence[Sequence[str]],
         rule: bool = False) -> None:
    """Print a table whose last line is of all prompts. rule: draw one above that line."""
    from rich.table import Table

    table = Table(title=plain(title), caption=caption)
    for number, heading in enumerate(headings):
        table.add_column(plain(heading), justify="right" if number else "left")
    for number, line in enumerate(lines, 1):
        last = number == len(lines)
        table.add_row(*map(plain, line), end_section=rule and number == len(lines) - 1, style="bold" if last else "")
    console.print(table)
