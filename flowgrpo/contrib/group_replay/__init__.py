"""Replay of recorded groups."""
