"""The starter: a small model that ships with the package, its scenes and its prompts.

Here are the few numbers of its card that callers need.
"""

from __future__ import annotations

CALL = {"max_sequence_length": 1}  # it has no T5, and the pipeline pads that many zero tokens in its place
EVAL_STEPS = 20
EVAL_GUIDANCE = 2.0
