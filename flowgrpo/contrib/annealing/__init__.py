"""Decoding whose temperature changes along a completion."""
