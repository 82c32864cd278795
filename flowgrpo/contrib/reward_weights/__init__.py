"""Weights of rewards that follow the run."""
