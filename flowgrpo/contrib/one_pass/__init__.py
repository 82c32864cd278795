"""Gradients from the graphs of the rollout's own steps, without a replay: `train.one_pass`."""
