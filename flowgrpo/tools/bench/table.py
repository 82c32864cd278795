"""Tables of a bench: results.md, results.csv, results.tex, and the lines that the terminal shows."""

import csv
import io
import math
import re
from statistics import mean
from typing import Any

import yaml

from flowgrpo.escaped import table
from flowgrpo.evaluation.statistics import format_interval, format_value

Rows = tuple[list[str], list[list[str]]]  # headings and lines
COST = ("`to 50%`: evaluations to that share of the reference's gain over the base; `seconds`: of training, as a ratio "
        "to the reference's; `zero variance`: share of groups whose samples all had the same accuracy in training; "
        "`KL`: to the base, per sample; `diversity`: distance between a prompt's samples, as a share of the base's; "
        "then rewards that were not trained on, before and after.")
SAME = 0.01  # of a cost, below which two are equal
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
         ">": r"\textgreater{}", "|": r"\textbar{}"} | {character: f"\\{character}" for character in "&%$#_{}"}


def accuracies(results: dict[str, Any]) -> Rows:
    """The paper's table: accuracy of every method and its difference to the reference, and what was spent; of the
    published parts and of the best of the sweep.

    Where methods spent differently, also the accuracy at the cost that all reached.
    """
    swept = any("tuned" in method for method in results["methods"])
    equal = [f"at {results['cost']:,.0f}"] if unequal(results) else []
    heads = ["method", "seeds", "accuracy, 95 %", "difference, 95 %", "p (Holm)", *equal, "spent",
             *["best of sweep, 95 %", "its lr, clip", "its difference, 95 %", "its p (Holm)"] * swept]
    rows = [["base", "", format_value(results["base"], 3)] + [""] * (len(heads) - 3)]
    for method in rank(results):
        row = [method["label"], str(method["seeds"]), _accuracy(method), *_difference(method, results["reference"]),
               *([format_value(method["at_cost"], 3)] if equal else []), f"{method['evaluations']:,.0f}"]
        if swept:
            tuned = method.get("tuned")
            row += ["-"] * 4 if tuned is None else [
                _accuracy(tuned), f"x{tuned['lr']:.3g}, x{tuned['clip']:.3g}",
                *_difference(method, results["reference"], tuned)]
        rows.append(row)
    return heads, rows


def _accuracy(method: dict[str, Any]) -> str:
    return format_interval(method["accuracy"], method["low"], method["high"], 3)


def _difference(method: dict[str, Any], reference: str | None, of: dict[str, Any] | None = None) -> list[str]:
    if method["label"] == reference:
        return ["reference", ""]
    found = (of or method)["difference"]
    return ["-", "-"] if found is None else [
        format_interval(found["mean"], found["low"], found["high"], 3, "+"), probability(found["holm"])]


def probability(p: float | None) -> str:
    return "-" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def unequal(results: dict[str, Any]) -> bool:
    """True if a method spent more than another, by more than SAME of it."""
    cost = results.get("cost")  # results of earlier versions have none
    return cost is not None and any(method["curve"][-1][0] > cost * (1 + SAME) for method in results["methods"])


def costs(results: dict[str, Any]) -> Rows:
    """Table of what every method spent: evaluations to shares of the gain, seconds, KL, diversity; see `COST`."""
    shares = [f"to {share:.0%}" for share, _ in results["goals"]]
    heads = ["method", *shares, "epochs", "seconds", "zero variance", "KL", "diversity", *results["watched"]]
    rows = []
    for method in rank(results):
        ratio = method["seconds_ratio"]
        watched = (f"{number(value['before'])} -> {number(value['after'])}" for value in method["watched"].values())
        reached = ("never" if value is None else f"{value:,.0f}" for value in method["reached"])
        rows.append([method["label"], *reached, f"{method['epochs']:.0f}",
                     "-" if ratio is None else f"x{ratio:.2f}", number(method["zero_variance"], ".0%"),
                     number(method["kl"]), number(method["diversity"], ".0%"), *watched])
    return heads, rows


def tasks(results: dict[str, Any]) -> Rows:
    names = list(results["base_tasks"])
    rows = [["base", *(format_value(results["base_tasks"][name], 3) for name in names)]]
    return ["method", *names], rows + [[method["label"], *(format_value(method["tasks"][name], 3) for name in names)]
                                       for method in rank(results)]


def rank(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Methods, the most accurate first."""
    return sorted(results["methods"], key=lambda method: -method["accuracy"])


def number(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else format(value, form)


def markdown(results: dict[str, Any]) -> str:
    lines = [f"# Bench of {results['model']}", "", *notes(results)]
    for title, rows in (("Accuracy", accuracies), ("Cost", costs), ("Tasks", tasks)):
        heads, body = rows(results)
        lines += ["", f"## {title}", "", *([COST, ""] if title == "Cost" else [])]
        lines.append(table([[cell.replace("|", "\\|") for cell in line] for line in (heads, *body)],
                           ["---", *["---:"] * (len(heads) - 1)]))
    return "\n".join(lines) + "\n"


def latex(results: dict[str, Any]) -> str:
    heads, body = accuracies(results)
    caption = " ".join(escaped(note.replace("`", "")) for note in notes(results) if note)
    head, *lines = (" & ".join(map(escaped, line)) + r" \\" for line in (heads, *body))
    return "\n".join([
        r"% \usepackage{booktabs}", r"\begin{table}", r"\centering", rf"\caption{{{caption}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\toprule", head, r"\midrule", *lines, r"\bottomrule",
        r"\end{tabular}", r"\end{table}", ""])


def escaped(text: str) -> str:
    """Text as LaTeX shows it, signs of numbers as minus signs."""
    text = "".join(LATEX.get(character, character) for character in " ".join(text.split()))
    return re.sub(r"^\[", "{[}", re.sub(r"(?<![\w.])-(?=\d)", "$-$", text))  # a line that begins with [ is a length


def as_csv(results: dict[str, Any]) -> str:
    """Line per method, and one more for its best of the sweep, with all digits; empty where nothing is known."""
    lines = []
    for method in rank(results):
        for column, found in (("published", method), ("sweep", method.get("tuned"))):
            if found is None:
                continue
            moved, runs = found["difference"] or {}, found["runs"]
            lines.append({
                "model": results["model"], "method": method["label"], "settings": column,
                "lr_factor": found.get("lr", 1.0), "clip_factor": found.get("clip", 1.0),
                "seeds": " ".join(str(run["seed"]) for run in runs), "prompts": results["measured_prompts"],
                "measured": results["measured"], "base": results["base"],
                **{key: found[key] for key in ("accuracy", "low", "high")}, "reference": results["reference"],
                "difference": moved.get("mean"),
                **{f"difference_{key}": moved.get(key) for key in ("low", "high")}, "p": moved.get("p"),
                "p_holm": moved.get("holm"), "budget": results["evaluations"],
                "spent": mean(run["evaluations"] for run in runs), "unit": results["unit"],
                **{"commit": ""} | method["software"]})
    file = io.StringIO()
    writer = csv.DictWriter(file, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def notes(results: dict[str, Any]) -> list[str]:
    """Notes below the tables of a bench, a paragraph each."""
    trained = ", ".join(results["trained"])
    budget = results.get("budget", "the epoch that reaches them is finished")  # of earlier versions
    lines = [f"{results['evaluations']:,} {results['unit'] or 'evaluations'} per run ({budget}), seeds 0 to "
             f"{results['seeds'] - 1}. Accuracy is `{results['measured']}` on {results['measured_prompts']} held-out "
             f"prompts. Training rewards: {trained}. Reference: `{results['reference']}`."]
    if "budget" in results:
        lines[0] += f" Intervals and p: {results['test']}. `spent` is of training alone, the mean of seeds."
    if made := {", ".join(f"{key} {value}" for key, value in method["software"].items())
                for method in results["methods"] if "software" in method}:
        lines.append(f"Made with {'; '.join(sorted(made))}.")
    if results["seeds"] == 1:
        lines.append("One seed: it says nothing of other seeds, so there is no interval and no test.")
    for method in results["methods"]:
        most = max((run["evaluations"] for run in method.get("runs", [])), default=0)
        if most > results["evaluations"]:
            lines.append(f"`{method['label']}` spent up to {most:,}, above the budget: its epochs cost more than the "
                         "two that were measured.")
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
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf).split("\n...")[0].strip()


def print_tables(results: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Column, Table

    from flowgrpo.log import plain_console

    for (name, *numbers), rows in (accuracies(results), costs(results)):
        table = Table(Column(name, no_wrap=True), *(Column(head, justify="right") for head in numbers),
                      box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        plain_console().print(table)
