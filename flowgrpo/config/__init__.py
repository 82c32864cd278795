"""Configuration of a run: its sections, parsing and validation."""

from flowgrpo.config import features
from flowgrpo.config.parse import load, validate
from flowgrpo.config.schema import Config, keys

__all__ = ["Config", "features", "keys", "load", "validate"]

features.load()
