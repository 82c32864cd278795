"""Rewards to advantages: comparison within a group, baselines, shaping, selection, token credit."""

from flowgrpo.advantages.group import group_relative

__all__ = ["group_relative"]
