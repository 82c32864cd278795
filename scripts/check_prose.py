"""Check the prose of README.md, CONTRIBUTING.md and docs/: no word of the list below, no sentence above 40 words.

    python scripts/check_prose.py            # part of `make lint`, which runs proselint too
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Word or phrase, and what stands for it.
AVOIDED = {
    "a person": "you, the user", "nobody": "no user", "whoever": "the user who", "somebody": "a user",
    "is told": "is reported", "are told": "are reported", "was told": "was reported", "at once told": "reported",
    "hands back": "returns", "foretells": "predicts", "a stranger": "a third party", "kin": "variants",
    "gone on from": "resumed", "look through": "check", "hosts": "base methods", "slip of the pen": "typo",
    "whatsoever": "any", "thereof": "of it", "herein": "here",
}
LONGEST = 40  # words of a sentence


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs with the number of their first line, without code, tables, headings and links' targets."""
    text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.S | re.M)
    start, lines = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        item = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        if not line.strip() or line.startswith(("|", "#", ">", "<", "!")) or item:
            if lines:
                yield start, " ".join(lines)
            lines = []
        if line.strip() and not line.startswith(("|", "#", ">", "<", "!")):
            start = start if lines else number
            lines.append(re.sub(r"\]\([^)]*\)", "]", line.strip()))


def problems(page: Path) -> Iterator[str]:
    """Yield a line per problem of a page."""
    for number, paragraph in prose(page.read_text(encoding="utf-8")):
        place = f"{page.relative_to(ROOT)}:{number}"
        plain = re.sub(r"`[^`]*`", "CODE", paragraph)
        for words, better in AVOIDED.items():
            if re.search(rf"\b{words}\b", plain, re.I):
                yield f"{place}: got {words!r}, expected {better!r}"
        for sentence in re.split(r"(?<=[.!?:;])\s+(?=[A-Z`\[(*])", plain):
            if (count := len(sentence.split())) > LONGEST:
                yield f"{place}: got a sentence of {count} words, expected at most {LONGEST}: {sentence[:60]}..."


def main() -> int:
    found = [line for page in PAGES for line in problems(page)]
    print("\n".join(found) or f"{len(PAGES)} pages: no problem")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
