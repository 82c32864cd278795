"""Findings of an evaluation: per reward and category, base against tuned, and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowgrpo.data.suites import Suite
from flowgrpo.escaped import markdown as markdown_of
from flowgrpo.escaped import plain
from flowgrpo.evaluation.distances import DISTANCES
from flowgrpo.evaluation.numbers import decimals
from flowgrpo.evaluation.statistics import (
    ALL,
    BOOTSTRAP,
    CONFIDENCE,
    WILSON,
    Interval,
    change,
    drift,
    interval,
    mean_of,
    win_rate,
)
from flowgrpo.evaluation.table import Scores, cell
from flowgrpo.evaluation.table import show as print_table
from flowgrpo.log import plain_console
from flowgrpo.nouns import counted


def summarise(suite: Suite, scores: dict[str, dict[str, np.ndarray]], spread: dict[str, np.ndarray],
              trained: Sequence[str] | None, unit: str = "images") -> dict:
    """Summarise an evaluation: means with intervals per arm, reward and category (including `all prompts`). With both
    arms also the change, tuned minus base on the same prompt and seed, the win rate, diversity, and drift in words.

    scores: [N, S] by arm and reward. spread: distance between the samples of each prompt [N, 1] by arm, or empty.
    unit: name of the samples.
    `category_means` is the mean over the categories, the score of some suites (GenEval).
    """
    table = Scores(scores, {ALL: list(range(len(suite.cases)))} | suite.categories)
    arms = table.means()
    summary: dict[str, Any] = {"confidence": CONFIDENCE, "arms": arms, "category_means": {
        arm: {name: _over_categories(categories) for name, categories in of_arm.items()}
        for arm, of_arm in arms.items()},
        "diversity": {arm: interval(values, BOOTSTRAP).as_json() for arm, values in spread.items()}}
    if scores.keys() != {"base", "tuned"}:
        return summary | {"compared": {}, "drift": []}
    moved, won = table.pairs(change), table.pairs(win_rate)
    closer = interval(spread["tuned"] - spread["base"], BOOTSTRAP) if spread else None
    if closer is not None:
        summary["diversity"]["change"] = closer.as_json()
    changes = {name: Interval(**of_reward[ALL]) for name, of_reward in moved.items()}
    return summary | {"compared": {name: {"change": moved[name], "win_rate": won[name]} for name in moved},
                      "drift": drift(changes, trained, closer, unit)}


def _over_categories(categories: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return mean_of([Interval(**entry) for name, entry in categories.items() if name != ALL]).as_json()


def table(results: dict[str, Any], reward: str) -> tuple[list[str], list[list[str]]]:
    """Return the headings and lines of one reward's table: a line per category, all prompts last."""
    arms, compared = results["arms"], results["compared"].get(reward)
    first = next(iter(arms.values()))[reward]
    moved = [entry["mean"] for entry in compared["change"].values()] if compared else []
    digits = decimals((entry["mean"] for of_arm in arms.values() for entry in of_arm[reward].values()), moved)
    lines = []
    for name in [*(name for name in first if name != ALL), ALL]:
        columns = [arms[arm][reward][name] for arm in arms]
        cells = [cell(column, digits) for column in columns]
        if compared:
            cells += [cell(compared["change"][name], digits, "+"), cell(compared["win_rate"][name], 3)]
        lines.append([name, str(columns[0]["prompts"]), *cells])
    return ["category", "prompts", *arms, *(["change", "win rate"] if compared else [])], lines


def methods(results: dict[str, Any], reward: str) -> str:
    """Describe the intervals of a reward's table."""
    [used] = {entry["method"] for arm in results["arms"].values() for entry in arm[reward].values()}
    paired = "; of changes and win rates Newcombe's, from the same limits"
    return f"95 % intervals: {used}{paired if used == WILSON and reward in results['compared'] else ''}"


def notes(results: dict[str, Any]) -> list[str]:
    """Return the notes below the tables, one sentence each."""
    said = []
    for name in next(iter(results["arms"].values())):
        means = {arm: of_arm[name] for arm, of_arm in results["category_means"].items()}
        if all(entry["prompts"] for entry in means.values()):
            digits = decimals(entry["mean"] for entry in means.values())
            listed = ", ".join(f"{arm} {cell(entry, digits)}" for arm, entry in means.items())
            said.append(f"{name}, mean over the categories: {listed}")
    unit, suite = f"{results['unit']}s", results["suite"]
    if trained := suite.get("trained"):
        said.append(f"the run trained on {trained} of the {counted(suite['prompts'], 'prompt')}: what it does on new "
                    "ones, a suite without them shows")
    said += [f"{name} failed on {count} {unit}, which are left out: the same command asks for them again"
             for name, count in results["failed"].items() if count]
    said += [f"{name}, {arm}: {', '.join(f'{what} {cell(entry)}' for what, entry in entries.items())}"
             for arm, rewards in results["tries"].items() for name, entries in rewards.items()]
    if results["diversity"]:
        cells = ", ".join(f"{name} {cell(entry, sign='+' * (name == 'change'))}"
                          for name, entry in results["diversity"].items())
        said.append(f"distance between the {unit} of a prompt: {cells}")
    if found := results.get("distances"):
        values = ", ".join(f"{name} {found[name]:.4g}" for name in DISTANCES if name in found)
        said.append(f"tuned {unit} to the base's, {found['images']} each, in the features {found['features']}: "
                    f"{values}")
    return [*said, *results["drift"]]


def title(results: dict[str, Any], reward: str) -> str:
    """Return the heading of a reward's table: suite and sample counts."""
    suite = results["suite"]
    return f"{reward} on {suite['name']} ({counted(suite['prompts'], 'prompt')}, {results['samples']} per prompt)"


def markdown(results: dict[str, Any]) -> str:
    """Return `table.md`: a table per reward, and the notes below them."""
    parts = []
    for reward in next(iter(results["arms"].values())):
        heads, lines = table(results, reward)
        rule = ["---", *["---:"] * (len(heads) - 1)]
        escaped = [list(map(markdown_of, line)) for line in [heads, *lines]]
        rows = ["| " + " | ".join(row) + " |" for row in [escaped[0], rule, *escaped[1:]]]
        parts.append("\n".join([f"## {markdown_of(title(results, reward))}", "", *rows, "", methods(results, reward)]))
    said = "\n".join(f"- {markdown_of(line)}" for line in notes(results))
    return "\n\n".join([*parts, *([said] if said else [])]) + "\n"


def show(results: dict[str, Any]) -> None:
    """Print the tables."""
    console = plain_console()
    for reward in next(iter(results["arms"].values())):
        print_table(console, title(results, reward), methods(results, reward), *table(results, reward))
    for note in notes(results):
        console.print(plain(note), highlight=False)
