"""Bandit over categories of prompts."""
