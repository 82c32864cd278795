"""Tables of a bench: results.md, and the lines that the terminal shows."""

from __future__ import annotations

import math
from typing import Any

import yaml

from flowgrpo.evaluation.statistics import format_value

Rows = tuple[list[str], list[list[str]]]  # headings and lines
COST = ("`to 50%`: evaluations to that share of the reference's gain over the base; `spent`: all evaluations of "
        "training; `seconds`: of training, as a ratio to the reference's; `zero variance`: share of groups whose "
        "samples all had the same accuracy in training; `KL`: to the base, per sample; `diversity`: "
        "distance between a prompt's samples, as a share of the base's; then rewards that were not trained on, before "
        "and after.")
SAME = 0.01  # of a cost, below which two are equal
MARKS = {1: "above", -1: "below", 0: ""}


def accuracies(results: dict[str, Any]) -> Rows:
    """Return accuracy and gain of every method, of the published parts and of the best of the sweep.

    Where methods spent differently, also the accuracy at the cost that all reached.
    """
    swept = any("tuned" in method for method in results["methods"])
    equal = [f"at {results['cost']:,.0f}"] if unequal(results) else []
    heads = ["method", "accuracy", "95 %", "seeds", "gain", *equal] + ["best of sweep", "its lr, clip"] * swept
    rows = [["base", format_value(results["base"], 3)] + [""] * (len(heads) - 2)]
    for method in rank(results):
        row = [method["label"], format_value(method["accuracy"], 3), f"{method['low']:.3f} to {method['high']:.3f}",
               f"{method['lowest']:.3f} to {method['highest']:.3f}", format_value(method["gain"], 3, "+"),
               *([format_value(method["at_cost"], 3)] if equal else [])]
        rows.append(row + (_tuned_cells(method) if swept else []))
    return heads, rows


def unequal(results: dict[str, Any]) -> bool:
    """Return True if a method spent more than another, by more than SAME of it."""
    cost = results.get("cost")  # results of earlier versions have none
    return cost is not None and any(method["curve"][-1][0] > cost * (1 + SAME) for method in results["methods"])


def _tuned_cells(method: dict[str, Any]) -> list[str]:
    if (tuned := method.get("tuned")) is None:
        return ["-", "-"]
    return [f"{tuned['accuracy']:.3f}", f"x{tuned['lr']:.3g}, x{tuned['clip']:.3g}"]


def costs(results: dict[str, Any]) -> Rows:
    """Return what every method spent: evaluations to shares of the reference's gain, seconds, KL and diversity.
    `COST` says what the columns are."""
    shares = [f"to {share:.0%}" for share, _ in results["goals"]]
    heads = ["method", *shares, "spent", "epochs", "seconds", "zero variance", "KL", "diversity", *results["watched"]]
    rows = [[method["label"], *(_count(value) for value in method["reached"]), f"{method['evaluations']:,.0f}",
             f"{method['epochs']:.0f}", _times(method["seconds_ratio"]), _share(method["zero_variance"]),
             _number(method["kl"]), _share(method["diversity"]),
             *(f"{_number(value['before'])} -> {_number(value['after'])}" for value in method["watched"].values())]
            for method in rank(results)]
    return heads, rows


def tasks(results: dict[str, Any]) -> Rows:
    """Return the accuracy of every task."""
    names = list(results["base_tasks"])
    rows = [["base", *(format_value(results["base_tasks"][name], 3) for name in names)]]
    return ["method", *names], rows + [[method["label"], *(format_value(method["tasks"][name], 3) for name in names)]
                                       for method in rank(results)]


def order(results: dict[str, Any], key: str = "differences") -> Rows:
    """Return the matrix of tests: whether the method of a row is significantly above or below that of a column, which
    has the row's number."""
    signs = {}
    for pair in results[key]:
        signs[pair["one"], pair["other"]] = pair["order"]
        signs[pair["other"], pair["one"]] = -pair["order"]
    labels = [method["label"] for method in rank(results) if any(method["label"] in pair for pair in signs)]
    numbers = [str(number) for number in range(1, len(labels) + 1)]
    return ["", *numbers], [[f"{number} {row}", *("=" if row == column else MARKS[signs[row, column]]
                                                  for column in labels)] for number, row in zip(numbers, labels)]


def rank(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the methods, the most accurate first."""
    return sorted(results["methods"], key=lambda method: -method["accuracy"])


def _count(value: float | None) -> str:
    return "never" if value is None else f"{value:,.0f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"x{value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def markdown(results: dict[str, Any]) -> str:
    """Return the Markdown of a bench."""
    lines = [f"# Bench of {results['model']}", "", *notes(results)]
    for title, rows in (("Accuracy", accuracies(results)), ("Cost", costs(results)), ("Tasks", tasks(results))):
        lines += ["", f"## {title}", "", *([COST, ""] if title == "Cost" else []), *_markdown(rows)]
    for title, key in (("Order", "differences"), ("Order, best of the sweep", "tuned_differences")):
        if results[key]:
            lines += ["", f"## {title}", "", "Methods of rows that are significantly above or below that of the column "
                      f"with its number, at 5 %: {results['test']}.", "", *_markdown(order(results, key))]
    return "\n".join(lines) + "\n"


def _markdown(rows: Rows) -> list[str]:
    heads, body = rows
    return [f"| {' | '.join(line)} |" for line in (heads, ["---", *["---:"] * (len(heads) - 1)], *body)]


def notes(results: dict[str, Any]) -> list[str]:
    """Return what a reader needs to know of the bench, a paragraph each."""
    trained = ", ".join(results["trained"])
    lines = [f"{results['evaluations']:,} {results['unit'] or 'evaluations'} per run (the epoch that reaches them is "
             f"finished), seeds 0 to {results['seeds'] - 1}. Accuracy is `{results['measured']}` on "
             f"{results['measured_prompts']} held-out prompts. Training rewards: {trained}. Reference: "
             f"`{results['reference']}`."]
    if results["seeds"] == 1:
        lines.append("One seed: intervals and tests are over prompts alone, and another seed may change the order.")
    if unequal(results):
        lines.append(f"Equal cost is in {results['unit']}. Methods end with a whole epoch, so some spent more: `at "
                     f"{results['cost']:,.0f}` is the accuracy there, between two measurements on a straight line. "
                     "Intervals and tests are of the ends.")
    if apart := results.get("apart"):
        lines.append(f"Unlike the recipe `{results['model']}`: " + "; ".join(
            f"`{key}: {_inline(own)}` for {f'`{_inline(recipe)}`' if recipe is not None else 'the default'} ({why})"
            for key, recipe, own, why in apart) + ".")
    for method in results["methods"]:
        if method["adjusted"]:
            told = ", ".join(f"`{key}: {_inline(value)}`" for key, value in method["adjusted"].items())
            lines.append(f"`{method['label']}` runs with {told}; other parts are the published ones.")
    lines += [f"Failed: {label}: {error}" for label, error in results["errors"].items()]
    return [part for line in lines for part in (line, "")][:-1]


def _inline(value: Any) -> str:
    """Return a value as a recipe writes it, in one line."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf).split("\n...")[0].strip()


def print_tables(results: dict[str, Any]) -> None:
    """Print the tables of accuracy and cost."""
    from rich import box
    from rich.table import Table

    from flowgrpo.log import plain_console

    for heads, rows in (accuracies(results), costs(results)):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for number, head in enumerate(heads):
            table.add_column(head, justify="right" if number else "left", no_wrap=not number)
        for row in rows:
            table.add_row(*row)
        plain_console().print(table)
