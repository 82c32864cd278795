"""Weights of tokens by their difference within a group."""
