"""Prompts by their predicted difficulty."""
