"""Rollouts of language models."""
