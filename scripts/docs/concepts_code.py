"""Write the code of the training loop into docs/concepts/index.md, where a block names it.

    python scripts/docs/concepts_code.py

A block begins with a line such as `# flowgrpo/train.py: Trainer.run_epoch`, and gets that function's source.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "index.md"
BLOCK = re.compile(r"```python\n# (flowgrpo/[\w/]+)\.py: ([\w.]+)\n.*?```", re.S)


def written(page: str) -> str:
    """Return the page with the present source in each of its blocks."""
    def block(match: re.Match[str]) -> str:
        found = importlib.import_module(match[1].replace("/", "."))
        for name in match[2].split("."):
            found = getattr(found, name)
        source = textwrap.dedent(inspect.getsource(found)).rstrip()
        return f"```python\n# {match[1]}.py: {match[2]}\n{source}\n```"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
