"""Extension of griffe: lines such as `name: what it is` of a docstring become items of a list."""

import re

import griffe

FIELD = re.compile(r"^([a-z_][\w, ]*): (?=\S)")


class Fields(griffe.Extension):
    """Rewrites docstrings as they are collected."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    """Return a docstring with its fields as items, each in a line of a Markdown list."""
    lines, before = [], False
    for line in text.splitlines():
        field = FIELD.match(line)
        if field and not before:
            lines.append("")
        lines.append(f"- `{field[1]}`: {line[field.end():]}" if field else f"  {line}" if before and line else line)
        before = bool(line) and (before or field is not None)
    return "\n".join(lines)
