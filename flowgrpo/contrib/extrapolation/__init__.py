"""Extrapolation of the weights."""
