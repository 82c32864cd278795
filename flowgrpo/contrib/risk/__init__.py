"""Risk-averse advantages."""
