"""Preferences of people: `flowgrpo vote` shows pairs of pictures or clips of one prompt, and writes the verdicts."""
