"""Hook of mkdocs: links to files outside of docs/ become their text."""

from __future__ import annotations

import os.path
import re

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page, **_) -> str:
    """Return the page's Markdown without links that leave docs/, since the site has no such files."""
    folder = os.path.join("docs", os.path.dirname(page.file.src_uri))

    def rewritten(match: re.Match) -> str:
        inside = os.path.normpath(os.path.join(folder, match[2])).startswith("docs" + os.sep)
        return match[0] if inside else match[1]

    return LINK.sub(rewritten, markdown)
