"""Judges by criteria, which a language model may write: `judge_rubric` and `text_judge_rubric`."""
