"""Boundary around code that a language model wrote: kinds.py has what a machine can offer, run.py runs code in it.

docs/security.md has the threat model.
"""
