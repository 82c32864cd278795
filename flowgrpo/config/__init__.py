"""The configuration of a run: its sections, how it is read and checked."""

from flowgrpo.config.parse import load, validate
from flowgrpo.config.schema import Config, keys

__all__ = ["Config", "keys", "load", "validate"]
