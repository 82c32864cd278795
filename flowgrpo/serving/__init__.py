"""Server of a reward: admission, answers, metrics."""
