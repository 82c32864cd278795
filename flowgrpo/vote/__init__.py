"""Preferences of people: `flowgrpo compare vote` shows pairs of pictures or clips of one prompt, and writes the
verdicts."""
