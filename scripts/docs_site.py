"""Hook of mkdocs: the methods' pages in the navigation, and links to files outside of docs/ as their text."""

from __future__ import annotations

import os.path
import re
from pathlib import Path

LINK = re.compile(r"\[([^\]\n]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")


def on_config(config):
    """Return the configuration with one page per method behind the list of methods."""
    pages = sorted((Path(config.docs_dir) / "methods").glob("*.md"), key=lambda page: (page.stem != "index", page.stem))
    for entry in config.nav:
        if entry.keys() == {"Methods"}:
            entry["Methods"] = [f"methods/{page.name}" for page in pages]
    return config


def on_page_markdown(markdown: str, page, **_) -> str:
    """Return the page's Markdown without links that leave docs/, since the site has no such files."""
    folder = os.path.join("docs", os.path.dirname(page.file.src_uri))

    def rewritten(match: re.Match) -> str:
        inside = os.path.normpath(os.path.join(folder, match[2])).startswith("docs" + os.sep)
        return match[0] if inside else match[1]

    return LINK.sub(rewritten, markdown)
