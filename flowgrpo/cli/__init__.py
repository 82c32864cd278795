"""Command line. User errors print one line and exit with code 2; `--help` does not import torch."""

from __future__ import annotations

from flowgrpo.cli.root import app, main

from flowgrpo.cli import train, encode, draw, evaluate, bench, results, vote, push, runs, about, prompts, rewards, new  # isort: skip  (order of the help)

__all__ = ["about", "app", "bench", "draw", "encode", "evaluate", "main", "new", "prompts", "push", "results",
           "rewards", "runs", "train", "vote"]
