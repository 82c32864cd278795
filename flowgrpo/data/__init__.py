"""Prompts, preference pairs and recorded pairs from files."""
