"""Command line. User errors print one line and exit with code 2; `--help` does not import torch."""

from __future__ import annotations

from flowgrpo.cli.root import app, main

from flowgrpo.cli import train, encode, draw, evaluate, bench, results, vote, label, push, runs, about, prompts, data  # isort: skip  (order of the help)
from flowgrpo.cli import rewards, evolve, experience, new  # isort: skip

__all__ = ["about", "app", "bench", "data", "draw", "encode", "evaluate", "evolve", "experience", "label", "main",
           "new", "prompts", "push", "results", "rewards", "runs", "train", "vote"]
