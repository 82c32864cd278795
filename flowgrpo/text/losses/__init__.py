"""Losses of tokens."""
