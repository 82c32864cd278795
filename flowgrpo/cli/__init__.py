"""Command line. User errors print one line and exit with code 2; `--help` does not import torch."""

from __future__ import annotations

from flowgrpo.cli.root import app, main

# Groups show their commands in this order.
from flowgrpo.cli import train, draw, evaluate, results, push, about, new  # isort: skip
from flowgrpo.cli import recipe_list, prompts, data, encode, rewards, label, runs, vote, bench  # isort: skip
from flowgrpo.cli import verify, evolve, experience  # isort: skip

__all__ = ["about", "app", "bench", "data", "draw", "encode", "evaluate", "evolve", "experience", "label", "main",
           "new", "prompts", "push", "recipe_list", "results", "rewards", "runs", "train", "verify", "vote"]
