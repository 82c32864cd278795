"""Credit of completions: shaping, scores of steps."""
