"""Held-out scores before and after, per task and over all prompts, with intervals."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from flowgrpo.evaluation.numbers import decimals, ranged
from flowgrpo.evaluation.statistics import ALL, change, interval, method_of

if TYPE_CHECKING:
    from flowgrpo.evaluation.measured import Measured

Rows = dict[str, dict[str, Any]]  # by task: intervals `before`, `after` and `change`


def compared(base: Measured, after: Measured, samples: int) -> dict[str, Rows]:
    """Return for each reward a row per `task` of the prompts' metadata, and one of all prompts, the last.

    samples: per prompt. A row has the intervals `before`, `after` and `change` as dictionaries.
    """
    tasks = defaultdict(list)
    for number, prompt in enumerate(base.prompts[::samples]):
        if "task" in prompt.metadata:
            tasks[str(prompt.metadata["task"])].append(number)
    places = {**tasks, ALL: list(range(len(base.prompts) // samples))}
    rows = {}
    for name in base.scores:
        old, new = (np.array(measured.scores[name]).reshape(-1, samples) for measured in (base, after))
        method = method_of(old, new)
        rows[name] = {task: {"before": interval(old[at], method).as_json(),
                             "after": interval(new[at], method).as_json(),
                             "change": change(old[at], new[at], method).as_json()} for task, at in places.items()}
    return rows


def cells(rows: Rows) -> list[list[str]]:
    """Return a line of text per row: task, before, after and change, with one number of decimals."""
    digits = digits_of(rows)
    return [[task, *(ranged(entry["mean"], entry["low"], entry["high"], digits, "+" * (key == "change"))
                     for key, entry in row.items())] for task, row in rows.items()]


def digits_of(rows: Rows) -> int:
    """Return the decimals of a table."""
    return decimals((row[key]["mean"] for row in rows.values() for key in ("before", "after")),
                    [rows[ALL]["change"]["mean"]])
