"""Dry run: an epoch of a recipe at full size on a pretended GPU, from configuration files alone."""
