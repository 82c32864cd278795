"""Rewards for video clips."""
