"""Weights on the frontier of trained and eval-only rewards, before reward hacking: `eval.best: frontier`."""
