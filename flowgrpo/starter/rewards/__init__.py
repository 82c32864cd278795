"""Rewards of the drawn worlds of the starters: scenes of shapes, and clips of one that moves."""
