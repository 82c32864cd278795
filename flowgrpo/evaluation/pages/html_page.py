"""Self-contained HTML page of pictures or texts: a row below each prompt, a column per sample. Texts are also written
as a Markdown table.

The columns' names stay visible while scrolling, and the page can be wider than the screen.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flowgrpo.escaped import cell, markdown
from flowgrpo.evaluation.numbers import bounds, ranged
from flowgrpo.evaluation.pages import grid, mp4
from flowgrpo.evaluation.pages.clips import durations, seconds_of
from flowgrpo.storage import atomic

if TYPE_CHECKING:
    import torch

    from flowgrpo.evaluation.statistics import Interval

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ font: 14px/1.4 system-ui, sans-serif;
  --paper: #fcfcfb; --card: #ffffff; --ink: #1f2328; --faint: #5c636d; --line: #d9dce1;
  --rose: #15703a; --fell: #a8320f; }}
@media (prefers-color-scheme: dark) {{ :root {{
  --paper: #14171b; --card: #1c2026; --ink: #e6e8eb; --faint: #a0a7b1; --line: #363c45; --rose: #63cf8d;
  --fell: #ffa37a; }} }}
body {{ margin: 0; background: var(--paper); color: var(--ink); }}
main {{ width: fit-content; min-width: min(100%, 40em); margin: 0 auto; padding: 20px 16px 64px;
  box-sizing: border-box; }}
h1 {{ font-size: 1.4rem; margin: 0 0 8px; overflow-wrap: anywhere; position: sticky; left: 16px; }}
table {{ border-collapse: collapse; }}
thead th {{ position: sticky; top: 0; z-index: 1; padding: 6px 14px 6px 0; text-align: left;
  background: var(--paper); }}
.prompt th {{ text-align: left; font-weight: 600; padding: 14px 0 6px; overflow-wrap: anywhere; }}
.prompt span {{ display: block; position: sticky; left: 16px; max-width: min(60em, calc(100vw - 32px));
  white-space: pre-wrap; }}
td {{ vertical-align: top; padding: 0 14px 8px 0; min-width: min(11em, 40vw); }}
img, video {{ display: block; border: 1px solid var(--line); border-radius: 4px; image-rendering: {rendering}; }}
p {{ white-space: pre-wrap; overflow-wrap: anywhere; min-width: 8em; max-width: 40em; margin: 0; padding: 6px 8px;
  background: var(--card); border: 1px solid var(--line); border-radius: 4px; }}
figure {{ margin: 0 0 6px; }} figcaption {{ color: var(--faint); font-size: 13px; }}
dl {{ display: grid; grid-template-columns: 1fr auto; margin: 4px 0 0; font-size: 13px; gap: 0 8px; }}
dt {{ color: var(--faint); overflow-wrap: break-word; min-width: 0; }}
dd {{ margin: 0; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
dd small {{ display: block; color: var(--faint); }}
@media (max-width: 480px) {{ img, video {{ max-width: 40vw; height: auto; }} td, thead th {{ padding-right: 10px; }} }}
.rose {{ color: var(--rose); }}
.fell {{ color: var(--fell); }}
</style></head><body><main>
<h1>{title}</h1>
<table><thead><tr>{columns}</tr></thead><tbody>
"""
MARKS = {1: ' class="rose">\u25b2 ', 0: ">", -1: ' class="fell">\u25bc '}


def write_page(path: str | Path, title: str, columns: Sequence[str], rows: Sequence[grid.Row],
               summary: grid.Summary | None = None, fps: float | None = None) -> Path:
    """Write the rows under their columns' names, each below its prompt. Scores above those of a row's first picture
    have a green triangle up, below it a red one down.

    Pictures are resized as on the PNG page (grid.py); clips are videos, or animated WebPs without an encoder.
    summary: the last row. fps: frames per second of clips.
    """
    path = Path(path)
    sourced = any(row.sources for row in rows)
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in (["source"] * sourced + [*columns]))
    small = all(isinstance(image, str) or max(image.shape[-2:]) < grid.SMALLEST
                for row in rows for image in row.images)
    digits = grid.digits_of(rows)
    text = HEAD.format(title=html.escape(title), columns=heads, rendering="pixelated" if small else "auto")
    lines = [*(_row(row, digits, fps, sourced) for row in rows),
             *([_means(summary, digits, sourced)] if summary else [])]
    atomic.write_text(path, text + "".join(lines) + "</tbody></table>\n</main></body></html>\n")
    return path


def write_table(path: str | Path, title: str, columns: Sequence[str], rows: Sequence[grid.Row],
                summary: grid.Summary | None = None) -> Path:
    """Write texts under their columns' names as a Markdown table, each with its scores below; summary: the last row."""
    path = Path(path)
    digits = grid.digits_of(rows)
    lines = [["prompt", *map(markdown, columns)], ["---"] * (len(columns) + 1)]
    lines += [[cell(row.caption), *(_scored(image, scores, digits) for image, scores in zip(row.images, row.scores))]
              for row in rows]
    if summary:
        lines.append([summary.label, *(", ".join(f"{cell(_short(name))} {_ranged(of, digits[name])}"
                                                 for name, of in means.items()) for means in summary.columns)])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    atomic.write_text(path, f"# {markdown(title)}\n\n{table}")
    return path


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _ranged(of: Interval, digits: int) -> str:
    return ranged(of.mean, of.low, of.high, digits)


def _scored(text: torch.Tensor | str, scores: dict[str, float], digits: Mapping[str, int]) -> str:
    assert isinstance(text, str), "a table is of texts"
    listed = ", ".join(f"{_short(name)} {grid.shown(value, digits[name])}" for name, value in scores.items())
    return f"{cell(text)}<br>{cell(listed)}" if listed else cell(text)


def _row(row: grid.Row, digits: Mapping[str, int], fps: float | None, sourced: bool) -> str:
    cells = "".join(f"<td>{_image(image, fps)}{_scores(scores, row.scores[0], digits)}</td>"
                    for image, scores in zip(row.images, row.scores))
    beside = "".join(f"<figure>{_image(picture, fps)}<figcaption>{html.escape(name)}</figcaption></figure>"
                     for name, picture in row.sources)
    cells = f"<td>{beside}</td>{cells}" if sourced else cells
    return _prompt(row.caption, len(row.images) + sourced) + f"<tr>{cells}</tr>\n"


def _prompt(text: str, columns: int) -> str:
    return f'<tr class="prompt"><th scope="row" colspan="{columns}"><span>{html.escape(text)}</span></th></tr>'


def _means(summary: grid.Summary, digits: Mapping[str, int], sourced: bool) -> str:
    """Return the last row: the columns' means with intervals."""
    cells = ["<td></td>"] * sourced
    for means in summary.columns:
        lines = (_line(name, of.mean, summary.columns[0][name].mean, digits[name],
                       f"<small>{bounds(of.low, of.high, digits[name])}</small>") for name, of in means.items())
        cells.append(f"<td><dl>{''.join(lines)}</dl></td>")
    return _prompt(summary.label, len(cells)) + f"<tr>{''.join(cells)}</tr>\n"


def _image(image: torch.Tensor | str, fps: float | None) -> str:
    if isinstance(image, str):
        return f"<p>{html.escape(image)}</p>"
    file, frames = io.BytesIO(), [grid._picture(frame) for frame in (image if image.ndim == 4 else image[None])]
    size = f'width="{frames[0].width}" height="{frames[0].height}"'
    if image.ndim == 3:
        frames[0].save(file, format="PNG")
        return f'<img alt="" {size} src="{_data_url("image/png", file.getvalue())}">'
    seconds = seconds_of(len(frames), fps)
    frames[0].save(file, format="WEBP", save_all=True, append_images=frames[1:], loop=0, lossless=True,
                   duration=durations(seconds, len(frames)))
    still = f'<img alt="" {size} src="{_data_url("image/webp", file.getvalue())}">'
    video = mp4.encode(frames, seconds)
    if video is None:
        return still
    source = f'<source type="{mp4.TYPE}" src="{_data_url(mp4.TYPE, video)}">'
    first = io.BytesIO()
    frames[0].save(first, format="WEBP", quality=80)
    poster = _data_url("image/webp", first.getvalue())
    return f'<video {size} poster="{poster}" autoplay loop muted playsinline>{source}{still}</video>'


def _data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _scores(scores: dict[str, float], first: dict[str, float], digits: Mapping[str, int]) -> str:
    lines = (_line(name, value, first.get(name, value), digits[name]) for name, value in scores.items())
    return f"<dl>{''.join(lines)}</dl>" if scores else ""


def _line(name: str, value: float, before: float, digits: int, below: str = "") -> str:
    mark = MARKS[grid.moved(value, before, digits)]
    label = re.sub(r"(?<=[_.])", "<wbr>", html.escape(_short(name)))  # a name may break there
    return f"<dt>{label}</dt><dd{mark}{grid.shown(value, digits)}{below}</dd>"
