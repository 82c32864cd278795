"""The version of flowgrpo, also where it is a source tree that is not installed."""

__version__ = "0.1.0"
