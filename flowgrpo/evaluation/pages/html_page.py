"""Self-contained HTML page of pictures or texts: a line per prompt, a column per sample. Texts are also written as a
Markdown table.

The columns' names stay visible while scrolling, and the page can be wider than the screen.
"""

from __future__ import annotations

import base64
import html
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flowgrpo.evaluation.pages import grid

if TYPE_CHECKING:
    import torch

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light; font: 14px/1.4 system-ui, sans-serif; color: #1f2328; background: #fff; }}
body {{ margin: 0; }}
h1 {{ font-size: 18px; margin: 16px; }}
table {{ border-collapse: separate; border-spacing: 8px 12px; }}
thead th {{ position: sticky; top: 0; background: #fff; padding: 6px 0; z-index: 1; }}
tbody th {{ text-align: left; font-weight: normal; vertical-align: top; min-width: 9em; max-width: 16em; }}
td {{ vertical-align: top; }}
img {{ display: block; border: 1px solid #d5d8dd; image-rendering: {rendering}; }}
p {{ white-space: pre-wrap; overflow-wrap: anywhere; min-width: 12em; max-width: 40em; margin: 0; padding: 6px 8px;
  background: #f4f5f7; border: 1px solid #d5d8dd; }}
dl {{ display: grid; grid-template-columns: 1fr auto; margin: 4px 0 0; font-size: 13px; }}
dt {{ color: #6b7280; overflow-wrap: anywhere; }}
dd {{ margin: 0 0 0 8px; text-align: right; font-variant-numeric: tabular-nums; }}
.rose {{ color: #15803d; }}
.fell {{ color: #c0262d; }}
</style></head><body>
<h1>{title}</h1>
<table><thead><tr><th></th>{columns}</tr></thead><tbody>
"""


def write_page(path: str | Path, title: str, columns: Sequence[str], rows: Sequence[grid.Row]) -> Path:
    """Write the rows under their columns' names. Scores above those of a row's first picture are green, below it red.

    Pictures are resized as on the PNG page (grid.py); clips are animated.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    small = all(isinstance(image, str) or max(image.shape[-2:]) < grid.SMALLEST
                for row in rows for image in row.images)
    text = HEAD.format(title=html.escape(title), columns=heads, rendering="pixelated" if small else "auto")
    path.write_text(text + "".join(map(_row, rows)) + "</tbody></table>\n</body></html>\n", encoding="utf-8")
    return path


def write_table(path: str | Path, title: str, columns: Sequence[str], rows: Sequence[grid.Row]) -> Path:
    """Write texts under their columns' names as a Markdown table, each with its scores below."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [["prompt", *columns], ["---"] * (len(columns) + 1)]
    lines += [[_cell(row.caption), *map(_scored, row.images, row.scores)] for row in rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    path.write_text(f"# {title}\n\n{table}", encoding="utf-8")
    return path


def _scored(text: torch.Tensor | str, scores: dict[str, float]) -> str:
    assert isinstance(text, str), "a table is of texts"
    listed = ", ".join(f"{name.rpartition('/')[2]} {grid._number(value)}" for name, value in scores.items())
    return f"{_cell(text)}<br>{_cell(listed)}" if listed else _cell(text)


def _cell(text: str) -> str:
    """Escape a text for a table cell."""
    marked = re.sub(r"([\\`*_|~])", r"\\\1", html.escape(text, quote=False))
    return "<br>".join(marked.splitlines())


def _row(row: grid.Row) -> str:
    cells = "".join(f"<td>{_image(image)}{_scores(scores, row.scores[0])}</td>"
                    for image, scores in zip(row.images, row.scores))
    return f"<tr><th>{html.escape(row.caption)}</th>{cells}</tr>\n"


def _image(image: torch.Tensor | str) -> str:
    if isinstance(image, str):
        return f"<p>{html.escape(image)}</p>"
    file = io.BytesIO()
    if image.ndim == 3:
        first, kind = grid._picture(image), "png"
        first.save(file, format="PNG")
    else:
        frames = [grid._picture(frame) for frame in image]
        first, kind = frames[0], "webp"
        first.save(file, format="WEBP", save_all=True, append_images=frames[1:], duration=200, loop=0, lossless=True)
    code = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="" width="{first.width}" height="{first.height}" src="data:image/{kind};base64,{code}">'


def _scores(scores: dict[str, float], first: dict[str, float]) -> str:
    if not scores:
        return ""
    lines = []
    for name, value in scores.items():
        before, shown = first.get(name, value), grid._number(value)
        same = shown == grid._number(before) or math.isnan(value) or math.isnan(before)
        way = "" if same else ' class="rose"' if value > before else ' class="fell"'
        lines.append(f"<dt>{html.escape(name.rpartition('/')[2])}</dt><dd{way}>{shown}</dd>")
    return f"<dl>{''.join(lines)}</dl>"
