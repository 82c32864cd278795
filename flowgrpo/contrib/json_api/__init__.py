"""A JSON API of anybody's as a reward: `http`."""
