"""Page of a bench: index.html, one file without scripts, at any width, light and dark."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from typing import Any

from flowgrpo.bench import table
from flowgrpo.bench.charts import FIRST, SECOND, Curve, Frame, bars, frame, panel

STYLE = """:root {
  --paper: #fcfcfb; --card: #ffffff; --ink: #1f2328; --faint: #5c636d; --line: #d9dce1; --accent: #1d5fd1;
  --good: #15703a; --warn: #a8320f; --warn-paper: #fdf0e9; --good-paper: #ebf6ef; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171b; --card: #1c2026; --ink: #e6e8eb; --faint: #a0a7b1; --line: #363c45; --accent: #7fb0ff;
  --good: #63cf8d; --warn: #ffa37a; --warn-paper: #33221b; --good-paper: #182b20; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 20px 16px 64px; }
h1 { font-size: 1.6rem; margin: 0 0 8px; } h2 { font-size: 1.2rem; margin: 36px 0 8px; }
h3 { font-size: 1rem; margin: 0 0 2px; overflow-wrap: anywhere; }
p { margin: 0 0 8px; max-width: 68em; overflow-wrap: anywhere; } .faint { color: var(--faint); font-size: .875rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 14px; }
figure { margin: 0; min-width: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 12px; }
figcaption { color: var(--faint); font-size: .8125rem; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; max-width: 480px; height: auto; margin-top: 6px; }
text { font-size: 11px; fill: var(--faint); font-variant-numeric: tabular-nums; } text.ink { fill: var(--ink); }
.grid { stroke: var(--line); } .goal { stroke: var(--ink); stroke-dasharray: 4 4; opacity: .55; fill: none; }
.bar { fill: var(--accent); opacity: .75; } .whisker { stroke: var(--ink); stroke-width: 2; }
.dot { fill: var(--card); stroke: var(--ink); stroke-width: 2; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .875rem; }
th, td { padding: 5px 12px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; padding-left: 0; position: sticky; left: 0;
  background: var(--paper); white-space: normal; overflow-wrap: break-word; min-width: 12em; max-width: 17em; }
@media (max-width: 600px) { th:first-child { min-width: 9.5em; max-width: 9.5em; } th, td { padding: 5px 8px; } }
thead th { vertical-align: bottom; white-space: normal; min-width: 4em; color: var(--faint); font-weight: 600; }
.above { color: var(--good); background: var(--good-paper); }
.below { color: var(--warn); background: var(--warn-paper); }
.key { display: inline-block; width: 18px; height: 0; border-top: 3px solid; margin-right: 6px;
  vertical-align: middle; }
"""
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,"><title>{title}</title>
<style>
{style}</style></head><body><main>
<h1>{title}</h1>
"""


def page(results: dict[str, Any]) -> str:
    """Return the HTML of a bench's results."""
    title = html.escape(f"Methods on {results['model']}")
    first, *rest = (f"<p>{_code(line)}</p>\n" for line in table.notes(results) if line)
    return "".join([
        HEAD.format(title=title, style=STYLE), first,
        _section("Accuracy", _rows(table.accuracies(results)) + _accuracy_bars(results)), *_curves(results),
        _section("Cost", _rows(table.costs(results)) + _cost_bars(results), _code(table.COST)), _tasks(results),
        *_orders(results), _section("Notes", "".join(rest)) if rest else "", "</main></body></html>\n"])


def _code(text: str) -> str:
    """Return a Markdown paragraph as HTML: its code spans, and all else escaped."""
    return "".join(f"<code>{html.escape(part)}</code>" if number % 2 else html.escape(part)
                   for number, part in enumerate(text.split("`")))


def _section(title: str, content: str, told: str = "") -> str:
    return f"<h2>{title}</h2>\n" + (f'<p class="faint">{told}</p>\n' if told else "") + content


def _rows(rows: table.Rows, classes: bool = False) -> str:
    """Return a table. classes: cells are styled by their text."""
    heads, body = rows
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in heads)
    lines = []
    for first, *rest in body:
        cells = "".join(f'<td{f" class={text}" if classes and text in ("above", "below") else ""}>'
                        f"{html.escape(text)}</td>" for text in rest)
        name = re.sub(r"([_+])", r"\1<wbr>", html.escape(first))  # a name may break there
        lines.append(f'<tr><th scope="row">{name}</th>{cells}</tr>\n')
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{"".join(lines)}</tbody></table></div>\n'


def _figure(title: str, caption: str, svg: str) -> str:
    return (f"<figure><h3>{html.escape(title)}</h3><figcaption>{html.escape(caption)}</figcaption>{svg}</figure>\n")


# --- curves ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Sight:
    """Panels of one curve of every method. key: of the curve in the results; y: its values in words; x: what they are
    drawn against, in words, with its unit where a value of it is given."""

    key: str
    y: str
    x: str
    unit: str
    note: str = ""


DISTANCE = "the distance to the base", "of distance"
ROOT = (" The distance is the square root of the KL to the base per sample, in nats; dots are the measured epochs, "
        "in their order. A curve above and to the left of another gains more for less.")
WITHIN = " Diversity is the distance between the samples of a prompt, as a share of the base's."


def _curves(results: dict[str, Any]) -> list[str]:
    """Return the sections of curves: over evaluations, and over the distance to the base where it was measured."""
    sights = [Sight("curve", "Accuracy", results["unit"], results["unit"]),
              Sight("frontier", "Accuracy", *DISTANCE, ROOT),
              Sight("diversities", "Diversity kept", *DISTANCE, WITHIN)]
    return [_panels(results, sight) for sight in sights
            if any(len(method[sight.key]) > 1 for method in results["methods"])]


def _panels(results: dict[str, Any], sight: Sight) -> str:
    """Return a panel per method: its curve over the reference's, in the same axes."""
    methods = [method for method in table.ranked(results) if len(method[sight.key]) > 1]
    axes = frame([method[sight.key] for method in methods])
    reference = next((method for method in methods if method["label"] == results["reference"]), None)
    shown = [method for method in methods if method is not reference] or methods
    figures = "".join(_panel(method, reference, axes, sight) for method in shown)
    beside = f', <span class="key" style="border-color: {FIRST}"></span>{html.escape(str(results["reference"]))}'
    key = (f'<span class="key" style="border-color: {SECOND}"></span>the method{beside if reference else ""}; bands '
           f"are the lowest and the highest seed, the dashed line is the base.{sight.note}")
    return _section(f"{sight.y} against {html.escape(sight.x)}", f'<div class="cards">\n{figures}</div>\n', key)


def _panel(method: dict[str, Any], reference: dict[str, Any] | None, axes: Frame, sight: Sight) -> str:
    """Return the panel of a method."""
    own = method[sight.key]
    dots = sight.x == DISTANCE[0]
    curves = ([Curve(reference[sight.key], FIRST, dots)] if reference else []) + [Curve(own, SECOND, dots)]
    beside = f", {reference['label']} at {reference[sight.key][-1][1]:.3f}" if reference else ""
    (_, base, *_), (x, last, *_) = own[0], own[-1]
    told = (f"{method['label']}: {sight.y.lower()} from {base:.3f} to {last:.3f} after {_amount(x)} {sight.unit}"
            f"{beside}")
    return _figure(method["label"], f"{base:.3f} to {last:.3f}{beside}", panel(curves, axes, told, base))


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


# --- bars ------------------------------------------------------------------------------------------------------------

def _accuracy_bars(results: dict[str, Any]) -> str:
    """Return bars of the accuracy with its intervals, and dots at the best of a sweep."""
    methods = table.ranked(results)
    tuned = [method["tuned"]["accuracy"] if "tuned" in method else None for method in methods]
    swept = any(best is not None for best in tuned)
    told = ", ".join(f"{method['label']} {method['accuracy']:.3f} ({method['low']:.3f} to {method['high']:.3f})"
                     + (f", {best:.3f} with the best of the sweep" if best is not None else "")
                     for method, best in zip(methods, tuned, strict=True))
    drawn = bars([(method["label"], method["accuracy"], f"{method['accuracy']:.3f}") for method in methods],
                 f"Accuracy: {told}", results["base"], [(method["low"], method["high"]) for method in methods],
                 dots=tuned if swept else ())
    caption = "with 95 % intervals; the dashed line is the base" + ("; a dot is the best of the sweep" if swept else "")
    return f'<div class="cards" style="margin-top: 14px">\n{_figure("Accuracy", caption, drawn)}</div>\n'


def _cost_bars(results: dict[str, Any]) -> str:
    """Return bars of seconds, KL, diversity and the watched rewards."""
    methods = table.ranked(results)
    figures = [("Seconds of training", f"as a ratio to {results['reference']}, the dashed line", "seconds_ratio", 1.0),
               ("KL to the base", "per sample, of the trained model", "kl", None),
               ("Diversity kept", "within a prompt, as a share of the base's, the dashed line", "diversity", 1.0)]
    drawn = [_figure(title, caption, bars([(method["label"], method[key], _number(method[key])) for method in methods],
                                          _told(title, methods, key), mark))
             for title, caption, key, mark in figures]
    for name in results["watched"]:
        values = [(method["label"], method["watched"][name]["after"], _number(method["watched"][name]["after"]))
                  for method in methods]
        before = methods[0]["watched"][name]["before"]
        if all(value is None or value >= 0 for _, value, _ in values):
            drawn.append(_figure(name, "eval-only; the dashed line is the base", bars(
                values, f"{name}: {', '.join(f'{label} {text}' for label, _, text in values)}", before)))
    return f'<div class="cards" style="margin-top: 14px">\n{"".join(drawn)}</div>\n'


def _told(title: str, methods: list[dict[str, Any]], key: str) -> str:
    return f"{title}: {', '.join(f'''{method['label']} {_number(method[key])}''' for method in methods)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _tasks(results: dict[str, Any]) -> str:
    """Return bars of every task's accuracy; nothing for prompts without tasks."""
    if not results["base_tasks"]:
        return ""
    methods = table.ranked(results)
    highest = max(method["tasks"][task] for method in methods for task in results["base_tasks"])
    figures = [_figure(task, f"base {base:.3f}, the dashed line", bars(
        [(method["label"], method["tasks"][task], f"{method['tasks'][task]:.3f}") for method in methods],
        f"{task}: {', '.join(f'''{method['label']} {method['tasks'][task]:.3f}''' for method in methods)}", base,
        end=highest)) for task, base in results["base_tasks"].items()]
    return _section("Tasks", f'<div class="cards">\n{"".join(figures)}</div>\n')


def _orders(results: dict[str, Any]) -> list[str]:
    """Return the matrices of tests."""
    told = ("Methods of rows that are significantly above or below that of the column with its number, at 5 %: "
            f"{html.escape(results['test'])}.")
    return [_section(title, _rows(table.order(results, key), classes=True), told)
            for title, key in (("Order", "differences"), ("Order, best of the sweep", "tuned_differences"))
            if results[key]]
