"""The command line. What a person gets wrong is told in one line, with exit code 2; `--help` loads no torch."""

from __future__ import annotations

from flowgrpo.cli.root import app, main

from flowgrpo.cli import train, draw, evaluate, results, about, rewards  # isort: skip  (the order of the help)

__all__ = ["about", "app", "draw", "evaluate", "main", "results", "rewards", "train"]
