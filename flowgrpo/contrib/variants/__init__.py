"""Variants of prompts that the policy writes."""
