"""Pages of the benches: docs/benchmark.md, its figures, and the result on each method's page.

    python scripts/bench_pages.py runs/bench runs/bench_text    # takes the results of finished benches first
    python scripts/bench_pages.py                               # of docs/bench_results.json, after an edit of notes

A FOLDER is that of a `flowgrpo compare methods`, one for each model. Results of a model replace its earlier ones in
docs/bench_results.json; those of other models stay. Notes on rows are in bench_notes.py. Hand-written text that follows
the written part under `## Result on the bench` of a method's page stays. tests/test_bench_pages.py reports pages that
are not current.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench_notes import NOTES
from bench_results import collected, dumped, load, merged

from flowgrpo.bench import charts, models, table
from flowgrpo.errors import UserError
from flowgrpo.evaluation.numbers import fixed
from flowgrpo.evaluation.pages.figures import COLOURS, FAINT, INK, save, styled
from flowgrpo.methods.presets import OVERLAYS, PRESETS
from flowgrpo.storage import atomic

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
DATA = "bench_results.json"
HEADING, BEGIN, END = "## Result on the bench", "<!-- Written by scripts/bench_pages.py -->", "<!-- End -->"
SECTION = re.compile(rf"^{HEADING}\n(.*?)(?=^## )", re.S | re.M)
BEFORE = "## Recipe\n"  # heading that a new section stands before
WRITTEN = re.compile(f"{BEGIN}.*?{END}", re.S)
VERDICTS = {1: "higher than", -1: "lower than", 0: "no significant difference to"}
LEFT_OUT = ("spent",)  # columns of the bench's table of costs that are nearly equal in all rows
TEXTS = ("method", "model", "verdict")  # columns that are no numbers
COLUMNS = 5  # panels beside each other
HEAD = """# Benchmark

Written by `scripts/bench_pages.py` from `docs/bench_results.json`: do not edit.

Methods of alignment on the packaged models, from the same budget each, by [`flowgrpo compare methods`](bench.md). That
page says what is counted and measured, and [how it is tested](bench.md#statistical-test). Models and worlds are small:
the order may be another one on large models. A difference is to the reference, with an interval that is not corrected
for the number of pairs; p-values and verdicts are corrected (Holm).
"""
TOLD = ("Parts are the published ones, unless [the benchmark](../benchmark.md) says otherwise. All methods, curves and "
        "costs are there. The interval is of this pair alone; the verdict is corrected for all pairs (Holm).")
MODIFIER = ("The difference includes that of the base method: what the modifier adds is the difference to the base "
            "method's own row.")


# --- docs/benchmark.md -----------------------------------------------------------------------------------------------

def page(results: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of docs/benchmark.md."""
    return HEAD + "".join(f"\n{section(model)}\n" for model in results)


def section(model: Mapping[str, Any]) -> str:
    """Return the section of a model."""
    name, [first, *rest] = model["model"], [line for line in table.notes(dict(model)) if line]
    lines = [f"## {name}", "", wrapped(first), "", wrapped(facts(model)), "", "```sh", command(model), "```", "",
             f"![Accuracy of each method against {model['unit']}; the reference is grey]({figure_of(name)})", "",
             wrapped(f"Accuracy against {model['unit']}: each method is blue, `{model['reference']}` grey, the base "
                     "dashed. Bands are the lowest and the highest seed."), "",
             f"### Accuracy on {name}", "", *markdown(accuracies(model)), "", *orders(model)]
    lines += [f"### Cost on {name}", "", wrapped(table.COST.replace("`spent`: all evaluations of training; ", "")), "",
              *markdown(without(table.costs(dict(model)), LEFT_OUT))]
    if model["base_tasks"]:
        lines += ["", f"### Tasks on {name}", "", *markdown(table.tasks(dict(model)))]
    if notes := [*rest, *(f"`{label}`: {text}." for label, text in noted(model)), *by_commit(model)]:
        lines += ["", f"### Notes on {name}", "", *(wrapped(f"- {note}", "  ") for note in notes)]
    return "\n".join(lines)


def facts(model: Mapping[str, Any]) -> str:
    """Return commit, version, precision, sizes of the prompt sets and shared settings in words."""
    commits = ", ".join(map(brief, model["commits"]))
    settings = ", ".join(f"`{key}` {shown(value)}" for key, value in model["settings"].items())
    sizes = model["prompts"]
    return (f"Commit {commits}, version {', '.join(model['versions'])}, {', '.join(model['precisions'])}. "
            f"{sizes['train']:,} prompts are trained on, and {sizes['validation']:,} are left to validation. "
            f"Settings of all methods: {settings}.")


def brief(commit: str) -> str:
    return f"{commit[:8]}{' with changes' * commit.endswith(' with changes')}"


def by_commit(model: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rows of every commit, if the benches of a model have several."""
    for commit in model["commits"] if len(model["commits"]) > 1 else ():
        labels = [method["label"] for method in model["methods"] if commit in method["commits"]]
        if labels:
            yield f"Commit {brief(commit)}: {', '.join(f'`{label}`' for label in labels)}."


def shown(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def command(model: Mapping[str, Any]) -> str:
    """Return the command that made the results."""
    name, limit = model["model"], model["limit"]
    words = ["flowgrpo compare methods", f"--model {name}", f"--evaluations {model['evaluations']}",
             f"--seeds {model['seeds']}", f"--points {model['points']}", *([f"--prompts {limit}"] if limit else []),
             *swept(model)]
    reference = next(method["given"] for method in model["methods"] if method["label"] == model["reference"])
    words += [f"--reference {reference}"] if reference != models.MODELS[name].reference else []
    given = ",".join(sorted(method["given"] for method in model["methods"]))
    return " ".join([*words, f"--methods {given}", f"--output runs/bench_{name}"])


def swept(model: Mapping[str, Any]) -> list[str]:
    """Return the option that names the swept methods; empty without one."""
    names = sorted(method["given"] for method in model["methods"] if "tuned" in method)
    return [f"--sweep {'all' if len(names) == len(model['methods']) else ','.join(names)}"] if names else []


def accuracies(model: Mapping[str, Any]) -> table.Rows:
    """Return the table of accuracies, the most accurate method first."""
    heads = ["method", "accuracy, 95 %", "seeds", "gain", f"difference to `{model['reference']}`, 95 %", "p, Holm"]
    option = swept(model)
    heads += ["best of sweep", "its lr, clip"] * bool(option)
    rows = [["base", fixed(model["base"], 3)] + [""] * (len(heads) - 2)]
    for method in model["methods"]:
        count, test = len(method["finals"]), method["difference"]
        row = [linked(method["label"]), ranged(method["accuracy"], method["low"], method["high"]),
               f"{method['lowest']:.3f} to {method['highest']:.3f}" + f" ({count})" * (count != model["seeds"]),
               fixed(method["gain"], 3, "+"), difference(test) or "the reference",
               "" if test is None else probability(test["holm"])]
        rows.append(row + (tuned(method) if option else []))
    return heads, rows


def linked(label: str) -> str:
    return f"[`{label}`](methods/{label}.md)" if label in PRESETS else f"`{label}`"


def ranged(mean: float, low: float, high: float, sign: str = "") -> str:
    return f"{fixed(mean, 3, sign)} ({fixed(low, 3, sign)} to {fixed(high, 3, sign)})"


def difference(test: Mapping[str, Any] | None) -> str:
    return "" if test is None else ranged(test["mean"], test["low"], test["high"], "+")


def probability(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def tuned(method: Mapping[str, Any]) -> list[str]:
    """Return accuracy, verdict and factors of the best of the sweep."""
    if (best := method.get("tuned")) is None:
        return ["-", "-"]
    test = best["difference"]
    verdict = f", {VERDICTS[test['order']].split()[0]}" if test and test["order"] else ""
    return [f"{fixed(best['accuracy'], 3)}{verdict}", f"x{best['lr']:.3g}, x{best['clip']:.3g}"]


def without(rows: table.Rows, names: Sequence[str]) -> table.Rows:
    """Return a table without the columns of these names."""
    heads, body = rows
    kept = [place for place, head in enumerate(heads) if head not in names]
    return [heads[place] for place in kept], [[row[place] for place in kept] for row in body]


def orders(model: Mapping[str, Any]) -> list[str]:
    """Return what the tests of all pairs say, a paragraph for the published parts and one for the best of the sweep."""
    lines = []
    for key, told in (("order", "Published parts"), ("tuned_order", "Best of the sweep")):
        if order := model[key]:
            chain = ", ".join(f"`{label}`" for label in order["chain"])
            lines += [wrapped(f"{told}: {order['significant']} of {order['pairs']} pairs of methods differ "
                              f"significantly, at 5 % after Holm's correction. The longest chain of methods, each "
                              f"significantly above the next, has {len(order['chain'])}: {chain}."), ""]
    return lines


def noted(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the label and the note of every row that has one."""
    for method in model["methods"]:
        for part in presets_of(method):
            if part in NOTES:
                yield method["label"], NOTES[part]


def markdown(rows: table.Rows) -> list[str]:
    heads, body = rows
    return [f"| {' | '.join(line)} |" for line in (
        heads, ["---" if head in TEXTS else "---:" for head in heads], *body)]


def wrapped(text: str, indent: str = "") -> str:
    """Return a paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


# --- pages of methods ------------------------------------------------------------------------------------------------

def presets_of(method: Mapping[str, Any]) -> list[str]:
    """Return the presets that a row is a result of, those of a recipe file included."""
    return (method["adjusted"].get("method") or method["label"]).split("+")


def result(name: str, results: Iterable[Mapping[str, Any]]) -> str:
    """Return the written part of a method's page; empty for a method without a row."""
    rows = [(model, method) for model in results for method in model["methods"] if name in presets_of(method)]
    if not rows:
        return ""
    swept = any("tuned" in method for _, method in rows)
    heads = ["model", "accuracy before", "after", "difference to the reference, 95 %"]
    body = [[f"`{model['model']}`" + (f", `{method['label']}`" if method["label"] != name else ""),
             fixed(model["base"], 3), fixed(method["accuracy"], 3), difference(method["difference"]) or "-",
             *([tuned(method)[0]] if swept else []), verdict(model, method)] for model, method in rows]
    lines = markdown((heads + ["best of sweep"] * swept + ["verdict"], body))
    told = f"{MODIFIER} {TOLD}" if name in OVERLAYS else TOLD
    return "\n".join([BEGIN, "", *lines, "", wrapped(told), "", END])


def verdict(model: Mapping[str, Any], method: Mapping[str, Any]) -> str:
    """Return what the test against the reference says of the published parts."""
    if (test := method["difference"]) is None:
        return "the reference"
    return f"{VERDICTS[test['order']]} `{model['reference']}`" + " (one seed)" * (len(method["finals"]) == 1)


def with_result(text: str, written: str) -> str:
    """Return a method's page with its written part replaced, added or, if it is empty, removed.

    Raises UserError for hand-written text on a result that is no longer there.
    """
    found = SECTION.search(text)
    why = WRITTEN.sub("", found[1]).strip() if found else ""
    if why and not written:
        raise UserError(f"{text.splitlines()[0]}: its page explains a result that is not in docs/{DATA}: remove the "
                        f"text under {HEADING!r}: {why[:60]}")
    rest = SECTION.sub("", text)
    at = found.start() if found else rest.index(BEFORE)
    made = "".join(f"{part}\n\n" for part in (HEADING, written, why) if part) if written else ""
    return rest[:at] + made + rest[at:]


# --- figures ---------------------------------------------------------------------------------------------------------

def figure_of(name: str) -> str:
    return f"benchmark_{name}.png"


def draw(model: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for every method: its curve over the reference's, with bands from the lowest to the highest seed."""
    reference = next(method for method in model["methods"] if method["label"] == model["reference"])
    methods = [method for method in model["methods"] if method is not reference] or [reference]
    rows = -(-len(methods) // COLUMNS)
    with styled() as pyplot:
        figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(9.5, 1.45 * rows + 0.3), sharex=True, sharey=True,
                                       squeeze=False)
        for number, (axis, method) in enumerate(zip_longest(axes.flat, methods)):
            if method is None:
                axis.axis("off")
                continue
            axis.axhline(model["base"], color=INK, lw=0.8, ls="--", alpha=0.5)
            for curve, colour in ((reference["curve"], FAINT), (method["curve"], COLOURS[0])):
                places, means, lows, highs = zip(*curve)
                axis.fill_between(places, lows, highs, color=colour, alpha=0.2, lw=0)
                axis.plot(places, means, color=colour, lw=1.4)
            axis.set_title(textwrap.shorten(method["label"].replace("+", " + "), 26, placeholder=" ..."), fontsize=7.5,
                           pad=4)
            axis.xaxis.set_major_locator(pyplot.MaxNLocator(2))
            axis.xaxis.set_major_formatter(lambda value, _: charts.count(value))
            axis.tick_params(labelsize=7, labelbottom=number + COLUMNS >= len(methods))
        save(figure, path)


# --- all of them -----------------------------------------------------------------------------------------------------

def pages(docs: Path, results: Sequence[Mapping[str, Any]]) -> dict[Path, str]:
    """Return the texts of all pages by their files: those of methods and, with results, that of the benchmark."""
    files = [file for file in sorted((docs / "methods").glob("*.md")) if file.stem != "index"]
    texts = {file: with_result(file.read_text(encoding="utf-8"), result(file.stem, results)) for file in files}
    return texts | ({docs / "benchmark.md": page(results)} if results else {})


def update(docs: Path, folders: Sequence[Path]) -> list[Path]:
    """Take the results of benches into a folder of documents and write its pages; return what has changed.

    Figures of models without results are removed. Raises UserError before anything is written.
    """
    results = merged(load(docs / DATA), [collected(folder) for folder in folders])
    if not results:
        raise UserError(f"docs/{DATA} is not there yet: give the folders of finished benches")
    texts = {docs / DATA: dumped(results)} | pages(docs, results)
    changed = [file for file, text in texts.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    for file in changed:
        atomic.write_text(file, texts[file])
    figures = {docs / figure_of(model["model"]): model for model in results}
    for file in docs.glob("benchmark*.png"):
        if file not in figures:
            file.unlink()
    for file, model in figures.items():
        draw(model, file)
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="folder of a finished bench")
    try:
        changed = update(DOCS, parser.parse_args().folders)
    except UserError as error:
        print(error)
        return 2
    print("\n".join(str(file.relative_to(ROOT)) for file in changed) or "all pages are current")
    return 0


if __name__ == "__main__":
    sys.exit(main())
