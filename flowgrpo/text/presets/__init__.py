"""Presets of language models."""
