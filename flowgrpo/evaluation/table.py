"""Table of scores by arm, reward, prompt and sample: means with intervals per category, changes, and its print."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from flowgrpo.escaped import plain
from flowgrpo.evaluation.statistics import ALL, Interval, change, decimals, interval, method_of, ranged

if TYPE_CHECKING:
    from rich.console import Console

    from flowgrpo.evaluation.measured import Measured

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


def compared(base: Measured, after: Measured, samples: int) -> dict[str, Rows]:
    """Return for each reward a row per `task` of the prompts' metadata, and one of all prompts, the last.

    samples: per prompt. A row has the intervals `before`, `after` and `change` as dictionaries.
    """
    tasks = defaultdict(list)
    for number, prompt in enumerate(base.prompts[::samples]):
        if "task" in prompt.metadata:
            tasks[str(prompt.metadata["task"])].append(number)
    scores = Scores({arm: {name: np.array(values).reshape(-1, samples) for name, values in measured.scores.items()}
                     for arm, measured in (("before", base), ("after", after))},
                    {**tasks, ALL: list(range(len(base.prompts) // samples))})
    means, changes = scores.means(), scores.pairs()
    return {name: {category: {arm: of_arm[name][category] for arm, of_arm in means.items()} | {"change": moved}
                   for category, moved in of_reward.items()} for name, of_reward in changes.items()}


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
    return ranged(entry["mean"], entry["low"], entry["high"], digits, sign)


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
