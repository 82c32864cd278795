"""Rewards of edits, which compare an output with its source: `preservation` and `edit_judge`."""
