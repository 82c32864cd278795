"""Smooth reward of the starter's scenes."""
