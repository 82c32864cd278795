"""Samplers of language models: decoding, groups, trees, continuations."""
