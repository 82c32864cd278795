"""Resampling of right samples."""
