"""Epochs that are sampled before the update of the one before: `train.staleness`, partial rollouts."""
