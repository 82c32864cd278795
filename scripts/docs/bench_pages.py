"""Page of the benches, docs/benchmark.md, and its figures.

    python scripts/docs/bench_pages.py runs/bench runs/bench_text    # takes the results of finished benches first
    python scripts/docs/bench_pages.py                               # of docs/data/bench_results.json
    python scripts/docs/bench_pages.py --commands                    # prints the commands that made the results

A FOLDER is that of a `flowgrpo compare methods`, one for each model. Results of a model replace its earlier ones in
docs/data/bench_results.json; those of other models stay. tests/test_bench.py reports a page that is not current.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_results import ELSEWHERE, collected, dumped, load, merged
from build_docs import page_of

from flowgrpo.config import validate
from flowgrpo.config.recipes import flat
from flowgrpo.config.schema import sections
from flowgrpo.errors import UserError
from flowgrpo.evaluation.statistics import format_value
from flowgrpo.methods.presets import PRESETS
from flowgrpo.storage import atomic
from flowgrpo.tools.bench import models, table
from flowgrpo.tools.bench.page import draw
from flowgrpo.tools.bench.table import probability

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DATA = "data/bench_results.json"
TEXTS = ("method", "model", "verdict")  # columns that are no numbers
HEAD = """# Benchmark

```
python scripts/docs/bench_pages.py --commands      # the commands of the table
```

Each method trains the same packaged model with the same budget of evaluations, by
[`flowgrpo compare methods`](bench.md#statistical-test). Models and worlds are small and favour methods that train early
steps: the order may differ on large models. p-values (bootstrap over prompts and seeds) have Holm's correction. In
the charts each method is blue, the reference grey and the base dashed; bands are the lowest and the highest seed.
Commits, settings and changed parts are in `docs/data/bench_results.json`.
"""

# --- docs/benchmark.md -----------------------------------------------------------------------------------------------

def page(results: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of docs/benchmark.md."""
    return HEAD + "".join(f"\n{section(model)}\n" for model in results)


def section(model: Mapping[str, Any]) -> str:
    """Return the section of a model: one figure and one table."""
    name, [first, *rest] = model["model"], [line for line in table.notes(dict(model)) if line]
    rest = [note for note in rest if " runs with " not in note] + since(model)
    lines = [f"## {name}", "", wrapped(first), "",
             f"![Accuracy of each method against {model['unit']}; the reference is grey]({figure_of(name)})", "",
             *markdown(accuracies(model))]
    return "\n".join([*lines, *([""] * bool(rest)), *(wrapped(f"- {note}", "  ") for note in rest)])


def since(model: Mapping[str, Any]) -> list[str]:
    """Return what the settings of a bench are now that they were not when the results were made, as a note."""
    usual, now = flat(validate({}).model_dump(), sections()), models.common_settings(model["model"])
    changed = [f"`{key}: {value}`" for key, value in now.items()
               if key not in ELSEWHERE and value != model["settings"].get(key, usual[key])]
    return [f"Made before the bench took {', '.join(changed)} from the recipe."] if changed else []


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
    """Return the table of accuracies, the most accurate first, with what each needed for the reference's gain."""
    heads = ["method", "accuracy, 95 %", f"p against `{model['reference']}`",
             f"{model['unit']} to {model['goals'][-1][0]:.0%} of its gain"]
    rows = [["base", format_value(model["base"], 3), "", ""]]
    for method in model["methods"]:
        test, needed = method["difference"], method["reached"][-1]
        rows.append([linked(method["label"]), ranged(method["accuracy"], method["low"], method["high"]),
                     "the reference" if test is None else probability(test["holm"]),
                     "not reached" if needed is None else f"{needed:,.0f}"])
    return heads, rows


def linked(label: str) -> str:
    return f"[`{label}`](methods/{page_of(label)})" if label in PRESETS else f"`{label}`"


def ranged(mean: float, low: float, high: float) -> str:
    return f"{format_value(mean, 3)} ({format_value(low, 3)}, {format_value(high, 3)})"


def markdown(rows: table.Rows) -> list[str]:
    heads, body = rows
    return [f"| {' | '.join(line)} |" for line in (
        heads, ["---" if head in TEXTS else "---:" for head in heads], *body)]


def wrapped(text: str, indent: str = "") -> str:
    """Return a paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


# --- figures ---------------------------------------------------------------------------------------------------------

def figure_of(name: str) -> str:
    return f"images/benchmark_{name}.png"


# --- all of them -----------------------------------------------------------------------------------------------------

def pages(docs: Path, results: Sequence[Mapping[str, Any]]) -> dict[Path, str]:
    """Return the text of the benchmark's page by its file; none without results."""
    return {docs / "benchmark.md": page(results)} if results else {}


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
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(file, texts[file])
    figures = {docs / figure_of(model["model"]): model for model in results}
    for file in docs.glob("images/benchmark*.png"):
        if file not in figures:
            file.unlink()
    for file, model in figures.items():
        file.parent.mkdir(exist_ok=True)
        draw(model, file)
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="folder of a finished bench")
    parser.add_argument("--commands", action="store_true", help="print the commands that made the results")
    given = parser.parse_args()
    if given.commands:
        print("\n".join(map(command, load(DOCS / DATA))))
        return 0
    try:
        changed = update(DOCS, given.folders)
    except UserError as error:
        print(error)
        return 2
    print("\n".join(str(file.relative_to(ROOT)) for file in changed) or "all pages are current")
    return 0


if __name__ == "__main__":
    sys.exit(main())
