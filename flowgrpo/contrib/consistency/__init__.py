"""Rewards by the likelihood of answers."""
