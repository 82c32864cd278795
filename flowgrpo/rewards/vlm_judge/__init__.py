"""Rewards by a vision-language model behind an endpoint that judges samples."""
