"""Policies over language models."""
