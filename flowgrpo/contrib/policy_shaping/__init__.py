"""Shaped probabilities of what another policy drew."""
