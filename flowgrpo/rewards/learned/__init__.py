"""Rewards learned from preferences."""
