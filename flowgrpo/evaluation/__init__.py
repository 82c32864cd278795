"""Evaluation: base against tuned, in pictures and in numbers."""
