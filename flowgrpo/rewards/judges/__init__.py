"""Rewards by a vision-language model that judges samples."""
