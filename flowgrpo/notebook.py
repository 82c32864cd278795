"""A run in a notebook: the value of `align`, and a bar that one output shows."""

from __future__ import annotations

import base64
import html
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import UserError

if TYPE_CHECKING:
    import pandas

WIDTH, HEIGHT = 240, 48  # of a curve, in pixels


def in_notebook() -> bool:
    """True in a process that a Jupyter kernel runs."""
    return "ipykernel" in sys.modules and "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None


class Cell:
    """File of a progress bar in a notebook: one output, which each state replaces.

    values: numbers by name, an epoch each, which are drawn as curves below the bar.
    """

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self.values: dict[str, list[float]] = {}
        self._html, self._output = HTML, display(HTML(""), display_id=True)

    def write(self, text: str) -> None:
        """Show a state; an empty one clears the bar, a line end leaves it."""
        if text == "\n":
            return
        shown = f"<pre>{html.escape(text.strip())}</pre>" if text.strip() else ""
        for name, values in self.values.items() if shown else ():
            if len(values) > 1:
                least, span = min(values), max(values) - min(values) or 1.0
                points = " ".join(f"{WIDTH * at / (len(values) - 1):.1f},"
                                  f"{HEIGHT - (HEIGHT - 4) * (value - least) / span - 2:.1f}"
                                  for at, value in enumerate(values))
                shown += ('<figure style="display:inline-block;margin:4px 12px">'
                          f'<svg width="{WIDTH}" height="{HEIGHT}">'
                          f'<polyline points="{points}" fill="none" stroke="#3f51b5" stroke-width="2"/></svg>'
                          f"<figcaption>{html.escape(name)}: {values[0]:.3f} to {values[-1]:.3f}</figcaption></figure>")
        self._output.update(self._html(shown))

    def flush(self) -> None:
        """Do nothing: each state is shown at once."""


class Summary(dict[str, Any]):
    """The content of a run's summary.json. In a notebook: its rewards and its images before and after.

    folder: the run's.
    """

    def __init__(self, content: dict[str, Any], folder: Path):
        super().__init__(content)
        self.folder = folder

    def metrics(self) -> pandas.DataFrame:
        """A row per epoch of metrics.jsonl, a column per metric. Raises UserError without pandas."""
        try:
            import pandas
        except ImportError:
            raise UserError("metrics: needs pandas: python -m pip install pandas") from None
        return pandas.read_json(self.folder / "metrics.jsonl", lines=True).set_index("epoch")

    def _repr_html_(self) -> str:
        after = self.get("after", {})
        rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{mean:.3f}</td><td>{after[name]:.3f}</td></tr>"
                       for name, mean in self.get("before", {}).items() if name in after)
        shown = f"<table><tr><th>held-out reward</th><th>before</th><th>after</th></tr>{rows}</table>"
        if (picture := self.folder / "before_after.png").is_file():
            encoded = base64.b64encode(picture.read_bytes()).decode()
            shown += f'<img alt="before and after" src="data:image/png;base64,{encoded}"/>'
        return f"{shown}<p>{html.escape(str(self.folder / 'report.html'))}</p>"

