"""Evaluation: what changed, in pictures and in numbers."""
