"""Rewards by episodes of earlier epochs."""
