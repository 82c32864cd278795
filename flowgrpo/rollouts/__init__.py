"""Rollouts: sample groups with a policy, replay their decisions with gradients."""
