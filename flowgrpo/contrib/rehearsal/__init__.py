"""Rehearsal of the base model's samples."""
