"""Rewards made of verdicts: several verifiers, an answer and its process, difficulty, nearness to a success."""
