"""Groups of completions that branch."""
