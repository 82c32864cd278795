"""Rewards for images."""
