"""Methods: their parts by name, presets, overlays, and checks of what goes together."""

from flowgrpo.methods.method import Method
from flowgrpo.methods.overlay import preset
from flowgrpo.methods.presets import PRESETS

__all__ = ["PRESETS", "Method", "preset"]
