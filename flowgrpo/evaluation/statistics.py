"""Statistics of scores: intervals of means, changes and win rates, signs of drift, numbers as text with one number of
decimals for all values of a reward, and the table of scores by arm, reward, prompt and sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
SKEWED = 2 / 3  # standard errors by which the skewness may differ from the sample's: scripts/measure/false_sentences.py
LEAST = 20  # prompts; with fewer, nothing is said of a change
PAIRS = 8  # images under their own prompts and others; with fewer, nothing is said of whether a reward reads prompts
EXACT = 1e-5  # relative difference of scores that is rounding
NEAR = 0.5  # of the std of scores: changes of a mean within it are small
WILSON, STUDENT, FIELLER = "Wilson", "Student's t over prompts", "Fieller"
ALL = "all prompts"  # row of all categories


def decimals(values: Iterable[float | None], changes: Iterable[float | None] = ()) -> int:
    """Decimals for a column of values: three significant digits of the largest value, two of the largest
    change, at least 3 below 10 and 1 above, at most MOST. None and NaN count for nothing."""
    largest, moved = (max((abs(value) for value in some if value is not None and math.isfinite(value)), default=0.0)
                      for some in (values, changes))
    digits = 1 if largest >= 10 else max(2 - math.floor(math.log10(largest)), 3) if largest else 3
    return min(max(digits, 1 - math.floor(math.log10(moved)) if moved else 0), MOST)


def format_value(value: float | None, digits: int, sign: str = "") -> str:
    """Value with so many decimals, a dash for None and NaN. sign: "+" for changes."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value if round(value, digits) else 0.0:{sign if round(value, digits) else ''}.{digits}f}"


def format_interval(mean: float | None, low: float | None, high: float | None, digits: int, sign: str = "") -> str:
    return f"{format_value(mean, digits, sign)} {bounds(low, high, digits, sign)}".strip()


def format_share(wins: Sequence[float]) -> str:
    """Share of wins with Wilson's 95 % interval. wins: 1, 0, or 1/2 for a tie."""
    share = interval(np.array(wins, dtype=np.float64)[:, None], WILSON)
    return format_interval(share.mean, share.low, share.high, 2)


def bounds(low: float | None, high: float | None, digits: int, sign: str = "") -> str:
    """Interval in brackets, an empty text if there is none."""
    ends = [format_value(end, digits, sign) for end in (low, high)]
    return "" if ends[0] == "-" else f"[{ends[0]}, {ends[1]}]"


@dataclass(frozen=True)
class Interval:
    """Mean over `prompts` prompts with its 95 % interval and the interval's method; NaN with too few prompts.

    p: of a change: that such a mean is found by chance, two-sided; below 0.05 where the interval excludes 0.
    """

    mean: float
    low: float
    high: float
    method: str
    prompts: int
    p: float = math.nan

    def as_json(self) -> dict[str, Any]:
        """Fields for JSON; p of a change alone."""
        return {name: value for name, value in asdict(self).items() if name != "p" or value == value}


def method_of(*scores: np.ndarray) -> str:
    """Method for all scores of a reward: WILSON if each is 0 or 1, else STUDENT."""
    values = np.concatenate([np.asarray(array, dtype=np.float64).ravel() for array in scores])
    values = values[~np.isnan(values)]
    return WILSON if len(values) and np.isin(values, (0, 1)).all() else STUDENT


def interval(scores: np.ndarray, method: str | None = None, samples: int = 1) -> Interval:
    """Mean of the prompts' means of scores [N, S], with its interval.

    WILSON (1927): of a share, on the effective number of prompts (Kish's design effect, 1965). That is N if the samples
    of each prompt agree, and up to the number of samples. STUDENT: `_student`, within the range of the scores; one
    prompt has no interval, equal ones one without a width.
    method: None takes `method_of(scores)`. samples: number of samples behind a score.
    """
    values, weights = _of_prompts(scores)
    if (method or method_of(scores)) == STUDENT:
        found = _student(values)
        return replace(found, p=math.nan, low=max(found.low, values.min(initial=math.inf)),
                       high=min(found.high, values.max(initial=-math.inf))) if found.low == found.low else found
    low, high = _wilson(*_share(values), float(weights.sum()) * samples) if len(values) else (math.nan, math.nan)
    return Interval(_mean(values), low, high, WILSON, len(values))


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _of_prompts(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and number of scores of each prompt that has any."""
    scores = np.asarray(scores, dtype=np.float64)
    scores = scores[~np.isnan(scores).all(1)]
    return np.nanmean(scores, 1), (~np.isnan(scores)).sum(1)


def _share(values: np.ndarray) -> tuple[float, float, int]:
    return float(values.mean()), float(values.var()), len(values)


def _wilson(share: float, spread: float, count: int, total: float, z: float = Z) -> tuple[float, float]:
    size = count * share * (1 - share) / spread if spread else total if 0 < share < 1 else count
    size = max(min(size, total), count)
    middle = share + z * z / (2 * size)
    half = z * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    low, high = ((middle + side * half) / (1 + z * z / size) for side in (-1, 1))
    return min(max(low, 0.0), share), max(min(high, 1.0), share)


def _student(values: np.ndarray) -> Interval:
    """Mean of values [N] with its interval, and the p-value of a mean of 0; neither of a single value.

    Student's t, and Hall's transformation of t for skewed values (1992, "On the removal of skewness by
    transformation"), with a skewness SKEWED standard errors below and above the sample's. The widest of the three
    counts, as few values show their skewness poorly. On 20 values, percentiles of a bootstrap err 1.6 times too often.
    """
    from scipy.special import stdtr, stdtrit

    mean, count = _mean(values), len(values)
    if count < 2:
        return Interval(mean, math.nan, math.nan, STUDENT, count)
    error, root = float(values.std(ddof=1)) / math.sqrt(count), math.sqrt(count)
    if error <= 1e-12 * abs(mean):
        return Interval(mean, mean, mean, STUDENT, count, float(mean == 0))
    skewness, apart = float(((values - mean) ** 3).mean()) / (error * root) ** 3, SKEWED * math.sqrt(6) / root
    bends = [0.0, (skewness - apart) / (3 * root), (skewness + apart) / (3 * root)]
    reach, t = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)), mean / error

    def unbent(value: float, bend: float) -> float:  # the t whose transformation by Hall is the value
        return float(np.cbrt(1 + 3 * bend * (value - bend / 2)) - 1) / bend if bend else value

    most, least = max(unbent(reach, bend) for bend in bends), min(unbent(-reach, bend) for bend in bends)
    sure = min(math.copysign(1, t) * (t + bend * t * t + bend * bend * t**3 / 3 + bend / 2) for bend in bends)
    return Interval(mean, mean - most * error, mean - least * error, STUDENT, count,
                    min(2 * float(stdtr(count - 1, -sure)), 1.0))


def change(base: np.ndarray, tuned: np.ndarray, method: str | None = None) -> Interval:
    """Mean of tuned minus base [N, S] on the same prompts and seeds, with its interval and p-value.

    WILSON: Newcombe's interval of paired shares (1998), from Wilson's limits of both and their correlation over
    prompts. method: None takes that of both arrays.
    """
    base, tuned = (np.asarray(scores, dtype=np.float64) for scores in (base, tuned))
    if (method or method_of(base, tuned)) == STUDENT:
        return _student(_of_prompts(tuned - base)[0])
    lacks = np.isnan(base) | np.isnan(tuned)
    (old, weights), (new, _) = (_of_prompts(np.where(lacks, math.nan, scores)) for scores in (base, tuned))
    if not len(old):
        return Interval(math.nan, math.nan, math.nan, WILSON, 0)
    shared = float(np.cov(old, new, ddof=0)[0, 1])
    shared = max(shared - 1 / (2 * len(old)), 0.0) if shared > 0 else shared  # Newcombe's correction of phi
    alike = shared / float(old.std() * new.std()) if old.std() and new.std() else 0.0
    one, other, total = _share(old), _share(new), float(weights.sum())
    moved = other[0] - one[0]

    def limits(z: float) -> tuple[float, float]:
        before, after = _wilson(*one, total, z), _wilson(*other, total, z)
        below, above = (math.sqrt(max(a * a - 2 * alike * a * b + b * b, 0.0)) for a, b in (
            (other[0] - after[0], before[1] - one[0]), (after[1] - other[0], one[0] - before[0])))
        return moved - below, moved + above

    inner, outer = 0.0, 40.0  # standard errors: the most whose interval excludes 0, by bisection
    for _ in range(50 if moved else 0):
        low, high = limits(middle := (inner + outer) / 2)
        inner, outer = (middle, outer) if low > 0 or high < 0 else (inner, middle)
    return Interval(moved, *limits(Z), WILSON, len(old), math.erfc(inner / math.sqrt(2)))


def ratio(first: np.ndarray, second: np.ndarray) -> Interval:
    """Mean of second over that of first, [N] each, paired, with its interval by Fieller (1954): the ratios r for which
    a t-test of second - r first does not reject a mean of 0. No ends where the mean of first may be 0. Pairs with a NaN
    are left out."""
    from scipy.special import stdtrit

    pairs = np.stack([np.asarray(values, dtype=np.float64) for values in (first, second)])
    pairs = pairs[:, ~np.isnan(pairs).any(0)]
    count = pairs.shape[1]
    if count < 2 or not (mean := pairs[0].mean()):
        return Interval(math.nan, math.nan, math.nan, FIELLER, count)
    middle, ((xx, xy), (_, yy)) = float(pairs[1].mean() / mean), np.cov(pairs)
    k = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))**2 / (count * mean**2)
    if k * xx >= 1:
        return Interval(middle, math.nan, math.nan, FIELLER, count)
    reach = math.sqrt(max(k * (yy - 2 * middle * xy + middle**2 * xx - k * (xx * yy - xy**2)), 0.0))
    low, high = ((middle - k * xy + side * reach) / (1 - k * xx) for side in (-1, 1))
    return Interval(middle, float(low), float(high), FIELLER, count)


def mean_of(intervals: Sequence[Interval]) -> Interval:
    """Mean of several means, such as a suite's categories, with its interval from theirs (the method of variance
    estimates recovery, Zou and Donner 2008), taken as independent. Intervals without a mean are left out."""
    known = [each for each in intervals if not math.isnan(each.mean)]
    if not known:
        return Interval(math.nan, math.nan, math.nan, STUDENT, 0)
    means, count = [each.mean for each in known], len(known)
    middle = sum(means) / count
    low = middle - math.sqrt(sum((each.mean - each.low) ** 2 for each in known)) / count
    high = middle + math.sqrt(sum((each.high - each.mean) ** 2 for each in known)) / count
    return Interval(middle, low, high, known[0].method, sum(each.prompts for each in known))


def holm(p_values: Sequence[float]) -> list[float]:
    """P values adjusted for their number (Holm 1979), in the given order: the k-th smallest of m times m - k + 1, never
    below a smaller one's, at most 1."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(p_values[place] * (len(p_values) - rank), 1.0))
        adjusted[place] = highest
    return adjusted


def win_rate(base: np.ndarray, tuned: np.ndarray, method: str | None = None) -> Interval:
    """Mean of `wins` with its interval; of shares it is 1/2 plus half of their change."""
    if (method or method_of(base, tuned)) == STUDENT:
        return interval(wins(base, tuned), STUDENT)
    moved = change(base, tuned, WILSON)
    mean, low, high = (0.5 + value / 2 for value in (moved.mean, moved.low, moved.high))
    return Interval(mean, low, high, WILSON, moved.prompts)


def wins(base: np.ndarray, tuned: np.ndarray) -> np.ndarray:
    """1 where the tuned sample beats the base's, 1/2 on a tie, 0 where it loses; NaN without a score: [N, S]."""
    return np.where(np.isnan(base) | np.isnan(tuned), np.nan, (tuned > base) + 0.5 * (tuned == base))


def directions(changes: Mapping[str, Interval]) -> dict[str, int]:
    """1 for a rise, -1 for a fall and 0 for what may be chance, by name.

    Of changes that are all by chance, one or more is taken for a rise or a fall in 5 % of cases (`holm`). One of fewer
    than LEAST prompts is 0 and not counted; one without a p-value counts by its interval.
    """
    tested = {name: each.p if each.p == each.p else float(each.low <= 0 <= each.high)
              for name, each in changes.items() if each.prompts >= LEAST}
    sure = {name for name, p in zip(tested, holm([*tested.values()])) if p < 1 - CONFIDENCE}
    return {name: (1 if each.mean > 0 else -1) if name in sure else 0 for name, each in changes.items()}


def drift(changes: dict[str, Interval], trained: Iterable[str] | None, diversity: Interval | None = None,
          unit: str = "images") -> list[str]:
    """Describe the effects of tuning, one sentence each. A change counts by `directions`, of the trained rewards and of
    the others apart.

    changes: tuned minus base, by reward. trained: the trained rewards, None if unknown. diversity: change of the
    distance between a prompt's samples. unit: name of the samples.
    A reward with scores on fewer than LEAST prompts is left out.
    """
    few = [f"nothing is said of drift in {name}: it has scores on {quantity(change.prompts, 'prompt')}, and at least "
           f"{LEAST} are needed" for name, change in changes.items() if change.prompts < LEAST]
    changes = {name: change for name, change in changes.items() if change.prompts >= LEAST}
    if not changes:
        return few
    known = set(changes if trained is None else trained)
    ways = {name: way for mine in (True, False) for name, way in directions(
        {name: change for name, change in changes.items() if (name in known) == mine}).items()}
    rose, fell = ([name for name in changes if ways[name] == way] for way in (1, -1))
    amounts = {name: _amount(name, change) for name, change in changes.items()}
    up, down = (" and ".join(amounts[name] for name in side if (name in known) == mine)
                for side, mine in ((rose, True), (fell, False)))
    eval_only = [name for name in changes if name not in known]
    if trained is None:
        what = ", ".join(amounts[name] for name in rose + fell) or "no reward changed by more than chance"
        said = f"{what} (which reward was trained on is not known, so that nothing is said of hacking)"
    elif up and down:
        said = f"possible reward hacking: {up}, which was trained on, while {down}, held out"
    elif not eval_only:
        said = "no held-out reward was measured, so that hacking could not be seen: add one to --rewards"
    elif not up:
        said = "no trained reward rose by more than chance" + (f"; {down}" if down else "")
    else:
        said = f"{up}; no held-out reward ({', '.join(eval_only)}) fell by more than chance"
    if diversity is not None and directions({"": diversity})[""] < 0:
        return [*few, said, f"the {unit} of a prompt became more alike: {_amount('diversity', diversity)}"]
    return [*few, said]


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
        rewards = next(iter(self.arms.values()))
        return {name: method_of(*(of_arm[name] for of_arm in self.arms.values())) for name in rewards}

    def means(self) -> dict[str, dict[str, dict[str, Entry]]]:
        """Means with intervals, by arm, reward and category."""
        return {arm: {name: {category: interval(values[rows], self.methods[name]).as_json()
                             for category, rows in self.categories.items()} for name, values in of_arm.items()}
                for arm, of_arm in self.arms.items()}

    def rows(self) -> dict[str, Rows]:
        """Means of both arms and the `change` from the first to the second, by reward and category."""
        means = self.means()
        return {name: {category: {arm: of_arm[name][category] for arm, of_arm in means.items()} | {"change": moved}
                       for category, moved in of_reward.items()} for name, of_reward in self.pairs().items()}

    def pairs(self, of: Callable[..., Interval] = change) -> dict[str, dict[str, Entry]]:
        """Statistic of the first arm and the second on the same prompts and seeds, by reward and category."""
        first, second = self.arms.values()
        return {name: {category: of(first[name][rows], second[name][rows], self.methods[name]).as_json()
                       for category, rows in self.categories.items()} for name in first}


def cells(rows: Rows) -> list[list[str]]:
    """Line of text per row: task, before, after and change, with one number of decimals."""
    digits = digits_of(rows)
    return [[task, *(cell(entry, digits, "+" * (key == "change")) for key, entry in row.items())]
            for task, row in rows.items()]


def digits_of(rows: Rows) -> int:
    return decimals((row[key]["mean"] for row in rows.values() for key in ("before", "after")),
                    [rows[ALL]["change"]["mean"]])


def cell(entry: Entry, digits: int = 3, sign: str = "") -> str:
    """Mean with its interval as text. sign: "+" for changes."""
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
