"""Modules of a pipeline that a method trains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Adapted:
    """Trained modules: denoisers, text encoders, which are then in the graph of every replay (TexForce, 2311.15657), or
    both.
    """

    denoisers: bool = True
    encoders: bool = False

    def __post_init__(self) -> None:
        if not self.denoisers and not self.encoders:
            raise ValueError("Adapted: denoisers and encoders are both false, expected one of them to be trained")
