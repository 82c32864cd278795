"""Texts of others (prompts, names of rewards, metrics, runs) in terminals, Markdown and pages, and images in texts."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

# Control characters besides tab and newline, and those that change the direction of a text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_MARKS = re.compile(r"([\\`*_|~]|\](?=[(\[:]))")  # a bracket alone is no link


def plain(text: str) -> str:
    """A text with its control characters written out, such as \\x1b, so that a terminal does not obey them."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def line(text: str) -> str:
    """Text as one line without control characters."""
    return plain(" ".join(text.split()))


def cell(text: str) -> str:
    """Text for a cell of a Markdown table; line breaks become <br>."""
    return "<br>".join(_MARKS.sub(r"\\\1", html.escape(plain(part), quote=False)) for part in text.splitlines())


def markdown(text: str) -> str:
    """Text as one line of Markdown in which nothing is markup."""
    return cell(line(text))


def table(rows: Sequence[Sequence[str]], align: Sequence[str] = ()) -> str:
    """Markdown table of escaped cells, the headings first. align: its second line, such as ---: of numbers."""
    lines = [rows[0], align or ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: str) -> str:
    """Text as code within a line of Markdown, also within a table."""
    shown = line(text).replace("|", "\\|")
    ticks = _ticks(shown, 1)
    space = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{ticks}{space}{shown}{space}{ticks}"


def code_block(text: str, language: str) -> str:
    """Text as a block of code in Markdown, whose fence does not occur in it."""
    return f"{(ticks := _ticks(text, 3))}{language}\n{text}\n{ticks}"


def _ticks(text: str, least: int) -> str:
    return "`" * max(least, 1 + max((len(run) for run in re.findall("`+", text)), default=0))


def one_line(text: object) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)[:2000]).split())
    return line if len(line) <= 400 else line[:397] + "..."


def fill(template: Path, **values: str) -> str:
    """A page's template with a value, which is HTML, in the place of each [[NAME]]."""
    return re.sub(r"\[\[([A-Z]+)\]\]", lambda match: values[match[1]], template.read_text(encoding="utf-8"))


def base64_of(image: Image, form: str = "PNG", **options: Any) -> str:
    """File of an image in base64. options: of PIL's writer."""
    image.save(file := io.BytesIO(), form, **options)
    return base64.b64encode(file.getvalue()).decode()
