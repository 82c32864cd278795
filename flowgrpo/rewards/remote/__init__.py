"""Rewards computed by a server."""
