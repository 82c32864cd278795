"""Rewards for completions of language models."""
