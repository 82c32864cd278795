"""Command line. User errors print one line and exit with code 2; `--help` does not import torch."""

from flowgrpo.cli.root import app, main

# Groups show their commands in this order.
from flowgrpo.cli import train, draw, evaluate, results, about, new  # isort: skip
from flowgrpo.cli import prompts, data, rewards, label, runs, compare, verify, contrib  # isort: skip
from flowgrpo.cli import taste, prepare, reproduce  # isort: skip

__all__ = ["about", "app", "compare", "contrib", "data", "draw", "evaluate", "label", "main", "new", "prepare",
           "prompts", "reproduce", "results", "rewards", "runs", "taste", "train", "verify"]
