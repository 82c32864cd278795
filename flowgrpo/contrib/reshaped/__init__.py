"""Advantages reshaped by difficulty, confidence or consistency."""
