"""Hook of mkdocs: the version at the foot, links that leave docs/, formulas as MathML.

Where the variable FLOWGRPO_URL has the repository's address, links to files outside of docs/ lead there, at the tag of
the version, and those to notebooks open them in Colab. Without it they become their text.

A formula is LaTeX between dollars, `$x_0$` in a line or `$$` around a block, as GitHub shows it too. It is written as
MathML when the site is built: a browser needs no script, no font and no network for it. `\\qquad` separates the
formulas of a block, which a narrow page shows below each other.
"""

import html
import os
import re
from pathlib import Path

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")
# What pymdownx.arithmatex makes of `$...$` and of `$$...$$`
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)
# A function's name before its argument without brackets, which MathML sets without a space
NAMED = re.compile(r"(?<!<msub>)(?<!<msup>)(?<!<msubsup>)(?<!<munder>)(<m([io])>(?:log|exp|max|min|sin|cos)</m\2>)"
                   r"(?=<m(?:i|text|sub|sup|over|frac|row|subsup)\b)")
VERSION = re.findall('"(.+)"', Path("flowgrpo/version.py").read_text(encoding="utf-8"))[-1]
COLAB = "https://colab.research.google.com/github/"
OVERLINE = re.compile(r'<mover>((?:(?!<mover>).)*?)<mo accent="true">&#x02015;</mo></mover>')


def on_config(config, **_):
    """Write the version of the pages at their foot."""
    config.copyright = f"flowgrpo {VERSION}. The pages of an installed version: <code>flowgrpo docs</code>"
    return config


def on_page_markdown(markdown: str, page, **_) -> str:
    """Return the page's Markdown with links that leave docs/ on the repository, or without them.

    The first page has no side columns, so that its image is as wide as the window.
    """
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    folder = os.path.join("docs", os.path.dirname(page.file.src_uri))
    url = os.environ.get("FLOWGRPO_URL", "").rstrip("/")

    def rewritten(match: re.Match) -> str:
        path = os.path.normpath(os.path.join(folder, match[2]))
        if path.startswith("docs" + os.sep):
            return match[0]
        if not url:
            return match[1]
        base = COLAB + url.split("/", 3)[3] if path.endswith(".ipynb") and "//github.com/" in url else url
        return f"[{match[1]}]({base}/blob/v{VERSION}/{path})"

    return LINK.sub(rewritten, markdown)


def typed(latex: str, display: str = "inline") -> str:
    """Return LaTeX as MathML. A line over a term is a border, since few fonts have one of any length."""
    from latex2mathml.converter import convert

    text = convert(latex, display=display)
    text = NAMED.sub(r'\1<mspace width="0.17em"/>', text)
    while OVERLINE.search(text):
        text = OVERLINE.sub(r'<mrow class="over">\1</mrow>', text)
    return text


def on_page_content(content: str, **_) -> str:
    """Return the page's HTML with MathML in place of LaTeX."""
    def typeset(match: re.Match) -> str:
        latex = html.unescape(match[2]).strip()
        if match[1] == "span":
            return typed(latex)
        parts = (typed(part.strip(), "block") for part in latex.split(r"\qquad"))
        return f'<div class="formula">{"".join(f"<div>{part}</div>" for part in parts)}</div>'

    return FORMULA.sub(typeset, content)
