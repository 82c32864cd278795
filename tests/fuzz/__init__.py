"""Battery of hostile inputs, and its corpus."""

from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")
