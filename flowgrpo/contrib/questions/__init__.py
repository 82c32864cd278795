"""Rewards by answers to questions about a sample."""
