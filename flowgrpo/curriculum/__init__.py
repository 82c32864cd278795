"""What only some methods are made of; what all have stands in `advantages`, `objectives` and `selection`."""
