"""Version of flowgrpo, also in a source tree that is not installed."""

__version__ = "0.2.0"
